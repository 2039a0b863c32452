"""Reads pickles without running anything they name: a small machine of its own for the opcodes.

Every name that a pickle gives becomes a `Name`, and only the functions of ours in `known` are ever called. An instance
of any other class becomes an object that holds its attributes (`effcli.saved.stand_ins`): no code of that class is
imported or run.

Neither of the readers at hand would do. `pickle.Unpickler` (CPython 3.11), even with a `find_class` that finds nothing,
dies of a key made of deeply nested tuples and sets aside gigabytes for a memo with one large index. torch's
`weights_only` (2.13) reads no class that was not imported and allowed before, and maps no archive that lies within
another file, as those of distributed checkpoints do.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from functools import partial
from typing import IO, Any

from effcli.saved.checks import MAX_PICKLE_BYTES, BoundedFile, RefusedPickleError, checked_key, weight_of
from effcli.saved.safe_text import safe
from effcli.saved.stand_ins import SavedObject, held

MAX_STEPS = 10_000_000
"""Each may make an object of 60 bytes, and takes a microsecond."""
_MAX_NUMBER_BITS = 512
_MAX_NAME_LENGTH = 1024
_BYTES_PER_CONTAINER = 216  # of an empty set, the largest
_MAX_CLASSES = 1000  # each takes a kilobyte, those of optimizers are a handful
_VALUES = frozenset(
    ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
     "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
     "BINBYTES8", "BYTEARRAY8")
)  # fmt: skip
"""Opcodes that push their argument."""
_FIXED = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_NEW: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
_PASSED_OVER = ("PROTO", "FRAME")
_MARK = object()
_DAMAGE = (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError, RuntimeError)


class Name:
    """A global that a pickle names, such as `torch.FloatStorage`; nothing is looked up or imported for it."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class Machine:
    """Runs the opcodes of one pickle over a stack and a memo.

    `known` are the only functions that are called, by the name that pickles give them; `constants` the values of other
    names; `storage` turns the persistent id of a tensor's storage into what the functions take. `unknown` says what
    stands for a call of anything else, by its arguments; without it such a call is refused.
    """

    def __init__(
        self,
        known: Mapping[str, Callable[..., Any]],
        constants: Mapping[str, Any],
        storage: Callable[[Any], Any] | None = None,
        *,
        unknown: Callable[[tuple[Any, ...]], Any] | None = None,
        max_steps: int = MAX_STEPS,
    ) -> None:
        self._known = known
        self._constants = constants
        self._storage = storage
        self._unknown = unknown
        self._max_steps = max_steps
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._room = 0
        self.classes: set[str] = set()
        """Classes whose instances were read as their attributes."""

    def run(self, file: IO[bytes]) -> Any:
        """Return the value of the pickle that starts where `file` stands, which then stands behind it.

        Raises:
            RefusedPickleError: it is damaged, or asks for what only running code could give.
        """
        self._stack, self._memo, start = [], {}, file.tell()
        self._room, steps = MAX_PICKLE_BYTES, 0
        bounded: Any = BoundedFile(file)
        try:
            for opcode, argument, _ in pickletools.genops(bounded):
                steps += 1
                if steps > self._max_steps or file.tell() - start > MAX_PICKLE_BYTES:
                    raise RefusedPickleError("its pickle is far larger than that of any optimizer")
                if opcode.name == "STOP":
                    return self._stack.pop()
                self._do(opcode.name, argument)
        except RefusedPickleError:
            raise
        except RecursionError as error:
            raise RefusedPickleError("its pickle is nested too deeply") from error
        except _DAMAGE as error:
            raise RefusedPickleError("its pickle is damaged or no pickle at all") from error
        raise RefusedPickleError("its pickle has no end")

    def _do(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _VALUES:
            if isinstance(argument, int) and argument.bit_length() > _MAX_NUMBER_BITS:
                raise RefusedPickleError("its pickle holds a number of absurd length")
            stack.append(argument)
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in _FIXED:
            stack.append(_FIXED[name])
        elif name in _NEW:
            self._spend(_BYTES_PER_CONTAINER)
            stack.append(_NEW[name]())
        elif name in _ACTIONS:
            _ACTIONS[name](self)
        elif name == "GLOBAL":
            self._push_name(argument.replace(" ", ".", 1))
        elif name not in _PASSED_OVER:
            raise RefusedPickleError(f"its pickle uses {name}, which tensors and plain values don't need")

    def _mark(self) -> None:
        self._stack.append(_MARK)

    def _pop(self) -> None:
        self._stack.pop()

    def _pop_mark(self) -> None:
        self._marked()

    def _list(self) -> None:
        self._stack.append(self._marked())

    def _tuple(self) -> None:
        self._stack.append(tuple(self._marked()))

    def _tuple_of(self, length: int) -> None:
        self._stack[-length:] = [tuple(self._stack[-length:])]

    def _dict(self) -> None:
        items = self._marked()
        self._stack.append({})
        self._set(items)

    def _append(self) -> None:
        item = self._stack.pop()
        self._extend([item])

    def _appends(self) -> None:
        self._extend(self._marked())

    def _setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _setitems(self) -> None:
        self._set(self._marked())

    def _additems(self) -> None:
        items = self._marked()
        target = self._stack[-1]
        if type(target) is not set:
            raise RefusedPickleError("its pickle adds to something that is no set")
        target.update(checked_key(item) for item in items)

    def _frozenset(self) -> None:
        self._stack.append(frozenset(checked_key(item) for item in self._marked()))

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise RefusedPickleError("its pickle names a global by something that is no text")
        self._push_name(f"{module}.{name}")

    def _push_name(self, text: str) -> None:
        if text.startswith("__builtin__."):  # what protocol 2, torch's own, calls `builtins`
            text = f"builtins.{text.removeprefix('__builtin__.')}"
        if len(text) > _MAX_NAME_LENGTH:
            raise RefusedPickleError("its pickle names a global of absurd length")
        self._stack.append(self._constants[text] if text in self._constants else Name(text))

    def _reduce(self) -> None:
        arguments = self._stack.pop()
        function = self._stack.pop()
        if not isinstance(arguments, tuple):
            raise RefusedPickleError("its pickle is damaged")
        self._stack.append(self.call(function, arguments))

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Return what one of the known functions makes of the arguments.

        Raises:
            RefusedPickleError: `function` is none of them.
        """
        name = function.text if isinstance(function, Name) else None
        if name not in self._known and self._unknown is not None:
            return self._unknown(arguments)
        if name is None:
            raise RefusedPickleError("its pickle calls something that is no function")
        if name not in self._known:
            raise RefusedPickleError(f"it asks to run '{safe(name, 80)}'")
        self._spend(sum(map(weight_of, arguments)))
        return self._known[name](*arguments)

    def _spend(self, num_bytes: int) -> None:
        """Take bytes off those that are left: a value that is passed again and again takes the memory of many."""
        self._room -= num_bytes
        if self._room < 0:
            raise RefusedPickleError("it would take far more memory than its size")

    def _newobj(self) -> None:
        arguments = self._stack.pop()
        self._stack.append(self._new(self._stack.pop(), arguments, {}))

    def _newobj_ex(self) -> None:
        keywords, arguments = self._stack.pop(), self._stack.pop()
        self._stack.append(self._new(self._stack.pop(), arguments, keywords))

    def _new(self, cls: Any, arguments: Any, keywords: Any) -> Any:
        if not isinstance(cls, Name) or not isinstance(arguments, tuple) or not isinstance(keywords, dict):
            raise RefusedPickleError("its pickle makes an object of something that is no class")
        if cls.text in self._known:
            return self.call(cls, arguments)
        self.meet(cls.text)
        attributes = {**keywords, **({"arguments": arguments} if arguments else {})}
        return held(cls.text, attributes)

    def meet(self, name: str) -> None:
        """Note a class whose instance is read as its attributes.

        Raises:
            RefusedPickleError: there are more of them than any file has.
        """
        self.classes.add(name)
        if len(self.classes) > _MAX_CLASSES:
            raise RefusedPickleError("its pickle names more classes than any optimizer has")

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if isinstance(target, SavedObject):
            target.take(state)
        elif hasattr(type(target), "take_pickled"):
            target.take_pickled(state)
        elif type(target) is not dict:  # attributes of an OrderedDict say nothing here
            raise RefusedPickleError("its pickle sets attributes of something that is no object")

    def _binpersid(self) -> None:
        if self._storage is None:
            raise RefusedPickleError("its pickle refers to something outside it")
        self._stack.append(self._storage(self._stack.pop()))

    def _marked(self) -> list[Any]:
        """Return what lies above the last mark, and take both off the stack."""
        for position in range(len(self._stack) - 1, -1, -1):
            if self._stack[position] is _MARK:
                items = self._stack[position + 1 :]
                del self._stack[position:]
                return items
        raise RefusedPickleError("its pickle is damaged")

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise RefusedPickleError("its pickle appends to something that is no list")
        target.extend(items)

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict:
            raise RefusedPickleError("its pickle sets items of something that is no mapping")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[checked_key(key)] = value


_ACTIONS: dict[str, Callable[[Machine], None]] = {
    "MARK": Machine._mark, "POP": Machine._pop, "POP_MARK": Machine._pop_mark,
    "LIST": Machine._list, "TUPLE": Machine._tuple, "DICT": Machine._dict, "FROZENSET": Machine._frozenset,
    "TUPLE1": partial(Machine._tuple_of, length=1), "TUPLE2": partial(Machine._tuple_of, length=2),
    "TUPLE3": partial(Machine._tuple_of, length=3),
    "APPEND": Machine._append, "APPENDS": Machine._appends, "ADDITEMS": Machine._additems,
    "SETITEM": Machine._setitem, "SETITEMS": Machine._setitems,
    "STACK_GLOBAL": Machine._stack_global, "REDUCE": Machine._reduce, "NEWOBJ": Machine._newobj,
    "NEWOBJ_EX": Machine._newobj_ex, "BUILD": Machine._build, "BINPERSID": Machine._binpersid,
}  # fmt: skip
"""Opcode that takes its arguments from the stack -> what it does. One that is missing is refused."""

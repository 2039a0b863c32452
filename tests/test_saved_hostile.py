"""Files that want to run code, take all memory or lie about themselves: one line each, and nothing of it happens."""

from __future__ import annotations

import builtins
import functools
import io
import operator
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from effcli.errors import DataError
from effcli.measure.optimizer_size import inspect_states
from effcli.saved import read_saved, values_of
from effcli.saved.checks import RefusedPickleError
from effcli.saved.pickle_reader import Machine
from tests.checkpoints import Trap

OPTIMIZER = {"state": {0: {"m": torch.ones(3)}}, "param_groups": [{"params": [0], "lr": 0.1}]}


class Calls:
    """An object that is pickled as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def refused(path: Path) -> str:
    """Return the one line with which a path is refused."""
    with pytest.raises(DataError) as raised:
        read_saved(path)
    text = str(raised.value)
    assert text.isprintable()
    assert len(text) < 400
    return text


def archive(path: Path, pickled: bytes, *storages: bytes) -> Path:
    """Return an archive like those of `torch.save`, around a pickle of any kind."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", sys.byteorder)
        for index, content in enumerate(storages):
            file.writestr(f"archive/data/{index}", content)
    return path


def hostile_calls(marker: Path) -> dict[str, Calls | Trap]:
    """Return calls that would make the file `marker`, by the global that a pickle of each names."""
    command = f"touch {marker}"
    return {
        f"{os.name}.system": Calls(os.system, command),
        "builtins.eval": Calls(eval, f"open({str(marker)!r}, 'w')"),
        "builtins.exec": Calls(exec, f"open({str(marker)!r}, 'w')"),
        "subprocess.call": Calls(subprocess.call, command.split()),
        "subprocess.Popen": Calls(subprocess.Popen, command.split()),
        "builtins.getattr": Trap(marker),
        "functools.partial": Calls(functools.partial, os.system, command),
        "operator.methodcaller": Calls(operator.methodcaller, "touch"),
        "builtins.__import__": Calls(builtins.__import__, "this"),
        "io.open": Calls(io.open, str(marker), "w"),
        "torch.serialization.load": Calls(torch.load, str(marker)),
        "torch.storage._load_from_bytes": Calls(torch.storage._load_from_bytes, b""),
        "builtins.map": Calls(map, os.system, [command]),
        "numpy.load": Calls(np.load, str(marker)),
    }


@pytest.mark.parametrize("name", hostile_calls(Path("x")))
def test_a_pickle_that_calls_is_refused_wherever_it_lies_and_nothing_runs(name: str, tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "o.pt"
    trap = hostile_calls(marker)[name]
    state_dict = OPTIMIZER | {"state": {0: {"m": torch.ones(3), "x": trap}}}
    for held in (trap, {"optimizer": OPTIMIZER, "x": [trap]}, state_dict):
        for save in (
            lambda value: torch.save(value, path),
            lambda value: torch.save(value, path, _use_new_zipfile_serialization=False),
            lambda value: path.write_bytes(pickle.dumps(value, protocol=2)),
            lambda value: path.write_bytes(pickle.dumps(value, protocol=5)),
        ):
            try:
                save(held)
            except RuntimeError:  # torch holds back what it cannot pickle itself
                continue
            said = refused(path)
            assert "it asks to run" in said
            assert "runs nothing" in said
    assert not marker.exists()


def test_the_refusal_names_what_was_asked_for(tmp_path: Path) -> None:
    torch.save({"optimizer": Calls(os.system, "true")}, tmp_path / "o.pt")
    said = refused(tmp_path / "o.pt")
    assert said.startswith(f"'{tmp_path / 'o.pt'}' was not read: it asks to run '{os.name}.system'; effcli reads")


def test_an_instance_of_a_class_is_no_call_and_its_class_is_neither_imported_nor_made(tmp_path: Path) -> None:
    """Opcodes that make an object without calling it, and set its attributes, only fill a holder."""
    (tmp_path / "effcli_trap.py").write_text("raise SystemExit('imported')\n")
    pickled = b"\x80\x02ceffcli_trap\nTrap\n)\x81}X\x01\x00\x00\x00aK\x01sb."
    assert "it is an object of something else" in refused(archive(tmp_path / "o.pt", pickled))
    assert "effcli_trap" not in sys.modules


@pytest.mark.parametrize(
    ("pickled", "said"),
    [pytest.param(*case, id=name) for name, case in {
        "call of a value": (b"\x80\x02K\x01)R.", "no function"),
        "build on a name": (b"\x80\x02cos\nsystem\n}b.", "no object"),
        "old instance": (b"(S'true'\nios\nsystem\n.", "uses INST"),
        "object by mark": (b"\x80\x02(cos\nsystem\nS'true'\no.", "uses OBJ"),
        "extension": (b"\x80\x02\x82\x01.", "uses EXT1"),
        "text id": (b"Pabc\n.", "uses PERSID"),
        "foreign id": (b"\x80\x02X\x03\x00\x00\x00abcQ.", "outside it that is no tensor"),
        "append to a name": (b"\x80\x02cos\nsystem\nK\x01a.", "no list"),
        "item of a name": (b"\x80\x02cos\nsystem\nK\x01K\x02s.", "no mapping"),
        "no end": (b"\x80\x02K\x01", "damaged"),
        "nothing on the stack": (b"\x80\x02.", "damaged"),
        "no such memo": (b"\x80\x02h\x07.", "damaged"),
        "far memo": (b"\x80\x02K\x01r\xff\xff\xff\xff.", "something else"),
        "long string": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"a.", "far larger"),
        "long bytes": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b"a.", "far larger"),
        "long number": (b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b"a.", "far larger"),
        "absurd number": (b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".", "absurd length"),
        "many zeros": (b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x10\x85R.", "damaged"),
        "deep key": (b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"K\x01s.", "nested too deeply"),
        "unhashable key": (b"\x80\x02}]K\x01s.", "damaged"),
        "object array": (b"\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00O8\x85R.", "no numbers"),
        "foreign dtype": (b"\x80\x02cnumpy\ndtype\nX\x0a\x00\x00\x00U900000000\x85R.", "no numbers"),
        "hidden call": (
            b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nctorch\nTensor\nX\x04\x00\x00\x00true\x85}tR.",
            "asks to run 'os.system'",
        ),
    }.items()],
)  # fmt: skip
def test_opcodes_that_no_tensor_needs_are_refused(pickled: bytes, said: str, tmp_path: Path) -> None:
    assert said in refused(archive(tmp_path / "o.pt", pickled))


def test_a_deep_list_and_a_value_passed_again_and_again_end_quickly(tmp_path: Path) -> None:
    nested = b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b"."
    assert "it is a list of something else" in refused(archive(tmp_path / "a.pt", nested))
    text = b"X" + struct.pack("<I", 1 << 20) + b"a" * (1 << 20)
    again = b"\x80\x02c_codecs\nencode\nq\x00" + text + b"q\x01X\x06\x00\x00\x00latin1q\x02" + b"0" * 2 + b"]("
    again += b"h\x00h\x01h\x02\x86R" * 5000 + b"e."
    assert "far more memory" in refused(archive(tmp_path / "b.pt", again))


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def doubled(times: int, make: bytes, start: bytes = b")") -> bytes:
    """Return opcodes for a value that holds the one before twice, and so on: tiny, and endless to go through."""
    pickled = start
    for number in range(times):
        pickled += b"q" + bytes([number]) + b"0(" + (b"h" + bytes([number])) * 2 + make
    return pickled


WRAPPER = b"ctorch._utils\n_rebuild_wrapper_subclass\n"
META = b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nfloat32\nK\x02\x85K\x01\x85I00\ntR"


def wrapped(inner: bytes) -> bytes:
    """Return opcodes for a tensor of a foreign class that holds these attributes."""
    made = b"(cfoo\nBar\nctorch\nfloat32\nK\x02\x85K\x01\x85K\x00NI00\nt"
    return b"ctorch._tensor\n_rebuild_from_type_v2\n(" + WRAPPER + b"ctorch\nTensor\n" + made + b"}(" + inner + b"utR"


@pytest.mark.parametrize(
    ("pickled", "said"),
    [pytest.param(*case, id=name) for name, case in {
        "key": (b"\x80\x02}" + doubled(60, b"t") + b"K\x01s.", "nested too deeply"),
        "key of sets": (b"\x80\x04}" + doubled(60, b"\x91") + b"K\x01s.", "nested too deeply"),
        "long key": (b"\x80\x02}" + doubled(3, b"t", text("a" * 1000)) + b"K\x01s.", "nested too deeply"),
        "path": (b"\x80\x02cpathlib\nPosixPath\n" + doubled(60, b"l", b"]") + b"\x85R.", "damaged"),
        "device": (b"\x80\x02ctorch\ndevice\n" + doubled(60, b"l", b"]") + b"\x85R.", "damaged"),
        "layout": (b"\x80\x02ctorch.serialization\n_get_layout\n" + doubled(60, b"l", b"]") + b"\x85R.", "damaged"),
        "long name": (b"\x80\x04" + text("a" * 600) * 2 + b"\x93.", "absurd length"),
        "many classes": (
            b"\x80\x02](" + b"".join(b"ca\nC%d\n)\x81" % number for number in range(1001)) + b"e.",
            "more classes than any",
        ),
        "sets": (
            b"\x80\x02](" + b"K\x01" * 50_000 + b"tq\x000]("
            + b"cbuiltins\nfrozenset\nh\x00\x85R" * 100 + b"e.",
            "far more memory",
        ),
        "empty sets": (b"\x80\x04](" + b"\x8f" * 1_300_000 + b"e.", "far more memory"),
        "wrappers": (
            b"\x80\x02" + META + b"q\x000"
            + b"".join(wrapped(text("a") + b"h%c" % n + text("b") + b"h%c" % n) + b"q%c0" % (n + 1) for n in range(40))
            + b"h\x28.",
            "further than any class",
        ),
    }.items()],
)  # fmt: skip
def test_values_that_grow_without_their_pickle_are_refused(pickled: bytes, said: str, tmp_path: Path) -> None:
    assert said in refused(archive(tmp_path / "o.pt", pickled))


def test_a_setting_that_is_endless_is_cut(tmp_path: Path) -> None:
    thousands = b"(" + b"K\x01" * 2000 + b"lq\x000(" + b"h\x00" * 2000 + b"lq\x010(" + b"h\x01" * 2000 + b"lq\x020"
    group = b"}(" + text("params") + b"]K\x00a" + text("x") + b"h\x02u"
    state_dict = b"}(" + text("state") + b"}" + text("param_groups") + b"]" + group + b"au."
    path = archive(tmp_path / "o.pt", b"\x80\x02" + thousands + state_dict)
    assert read_saved(path).groups[0]["x"][-1] == "..."


def test_a_large_value_in_many_states_is_refused_at_once(tmp_path: Path) -> None:
    value = b"](" + b"K\x01" * 20_000 + b"eq\x000"
    states = b"".join(b"J" + struct.pack("<i", number) + b"}K\x00h\x00s" for number in range(2000))
    state_dict = b"}(" + text("state") + b"}(" + states + b"u" + text("param_groups") + b"]u."
    assert "far longer than its size" in refused(archive(tmp_path / "o.pt", b"\x80\x02" + value + state_dict))


def test_a_value_that_holds_itself_is_read(tmp_path: Path) -> None:
    held: list[Any] = [1, torch.ones(3)]
    held.append(held)
    torch.save({"state": {0: {"m": held}}, "param_groups": [{"params": [0]}]}, tmp_path / "o.pt")
    assert inspect_states(read_saved(tmp_path / "o.pt").states.items()).state_bytes == 12


@pytest.mark.parametrize("name", ["numel", "shape", "untyped_storage", "__tensor_flatten__", "device", "__class__"])
def test_attributes_of_a_foreign_tensor_stand_for_nothing_else(name: str, tmp_path: Path) -> None:
    state = b"}" + text("m") + wrapped(text(name) + META) + b"s"
    pickled = b"\x80\x02}(" + text("state") + b"}K\x00" + state + b"s" + text("param_groups") + b"]u."
    found = read_saved(archive(tmp_path / "o.pt", pickled))
    assert inspect_states(found.states.items()).state_bytes == 8
    assert [each.shape for each in values_of(found, "*")] == [(2,)]


def test_a_pickle_of_endlessly_many_steps_is_given_up() -> None:
    pickled = b"\x80\x02" + b"]" * 1000 + b"."
    assert Machine({}, {}, max_steps=1002).run(io.BytesIO(pickled)) == []
    with pytest.raises(RefusedPickleError, match="far larger than that of any optimizer"):
        Machine({}, {}, max_steps=1001).run(io.BytesIO(pickled))


def tensor(storage: str, *, offset: int = 0, shape: Any = (2,), stride: Any = (1,), count: int = 2) -> bytes:
    """Return the pickle of a tensor on the storage `storage` of two numbers, with claims about it."""

    class Shell:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch._utils._rebuild_tensor_v2, (Place(), offset, shape, stride, False, {})

    class Place:
        pass

    class Writer(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, storage, "cpu", count) if isinstance(value, Place) else None

    buffer = io.BytesIO()
    Writer(buffer, protocol=2).dump({"state": {0: {"m": Shell()}}, "param_groups": [{"params": [0]}]})
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({"storage": "7"}, "bytes are missing"),
        ({"storage": "../data.pkl"}, "bytes are missing"),
        ({"storage": "0", "count": 3}, "bytes are missing"),
        ({"storage": "0", "count": -1}, "impossible shape"),
        ({"storage": "0", "count": 1 << 61}, "bytes are missing"),
        ({"storage": "0", "count": 1 << 62}, "impossible shape"),
        ({"storage": "0", "shape": (3,)}, "reaches behind its bytes"),
        ({"storage": "0", "offset": 1}, "reaches behind its bytes"),
        ({"storage": "0", "offset": -1, "shape": (1,)}, "impossible shape"),
        ({"storage": "0", "stride": (2,)}, "reaches behind its bytes"),
        ({"storage": "0", "stride": (-1,)}, "impossible shape"),
        ({"storage": "0", "shape": (2, 2)}, "damaged"),
        ({"storage": "0", "shape": (1 << 40, 1 << 40), "stride": (0, 0)}, "impossible shape"),
        ({"storage": "0", "shape": (1,) * 65, "stride": (1,) * 65}, "impossible shape"),
        ({"storage": "0", "shape": (2.0,)}, "impossible shape"),
        ({"storage": "0", "shape": (True,)}, "impossible shape"),
    ],
    ids=str,
)
def test_a_tensor_that_claims_more_than_it_has_is_refused(claims: dict[str, Any], said: str, tmp_path: Path) -> None:
    good = archive(tmp_path / "good.pt", tensor("0"), struct.pack("2f", 1.5, 2.5))
    assert read_saved(good).states["0"]["m"].tolist() == [1.5, 2.5]
    assert said in refused(archive(tmp_path / "bad.pt", tensor(**claims), struct.pack("2f", 1.5, 2.5)))


def test_archives_that_are_none_of_torchs_say_what_they_are(tmp_path: Path) -> None:
    torch.save(OPTIMIZER, tmp_path / "o.pt")
    whole = (tmp_path / "o.pt").read_bytes()
    bad = tmp_path / "bad.pt"
    with zipfile.ZipFile(bad, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"\x80\x02N.")
        file.writestr("archive/data/0", bytes(50 << 20))
    assert bad.stat().st_size < 1 << 20
    assert "compressed entries" in refused(bad)
    with zipfile.ZipFile(bad, "w") as file:
        file.writestr("word/document.xml", "<x/>")
    assert "no data.pkl" in refused(bad)
    with zipfile.ZipFile(bad, "w") as file:
        for name in ("m/data.pkl", "m/constants.pkl", "m/code/x.py"):
            file.writestr(name, "")
    assert "TorchScript" in refused(bad)
    for length in (100, len(whole) // 2, len(whole) - 1):
        bad.write_bytes(whole[:length])
        assert "cut short or damaged" in refused(bad)
    bad.write_bytes(whole.replace(b"little", b"big   "))
    assert "endian" in refused(bad)
    bad.write_bytes(b"junk" + whole[4:])
    assert "no file that torch.save wrote" in refused(bad)


def test_no_damage_ends_in_anything_but_one_line(tmp_path: Path) -> None:
    """Bytes changed and cut at random, in each layout of file: read, or refused in one line."""
    rng, path = random.Random(0), tmp_path / "o.pt"
    outcomes = set()
    for options in ({}, {"_use_new_zipfile_serialization": False}):
        torch.save({"optimizer": OPTIMIZER, "n": np.float64(3), "o": {"a"}}, path, **options)
        whole = path.read_bytes()
        for _ in range(300):
            changed = bytearray(whole)
            for _ in range(rng.choice((1, 3, 20))):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            path.write_bytes(changed[: rng.choice((None, rng.randrange(len(changed))))])
            try:
                outcomes.add(type(read_saved(path)).__name__)
            except DataError as error:
                outcomes.add(f"refused in {len(str(error).splitlines())} line")
    assert outcomes == {"SavedOptimizer", "refused in 1 line"}


def test_paths_that_are_no_files_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("step,loss\n1,2\n")
    assert "is a pipe, no file" in refused(tmp_path / "pipe")
    assert "cannot be read: Too many levels" in refused(tmp_path / "loop")
    assert "is empty" in refused(tmp_path / "empty")
    assert "no file that torch.save wrote; it begins with b'step,loss" in refused(tmp_path / "text")
    assert "is a device" in refused(Path("/dev/zero"))
    assert "does not exist" in refused(tmp_path / "none")
    assert "cannot be read: Not a directory" in refused(tmp_path / "text" / "o.pt")
    assert "zero byte" in refused(Path("a\0b"))
    with pytest.raises(DataError, match="File name too long"):
        read_saved(Path("a" * 5000))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_or_folder_without_permission_is_refused(tmp_path: Path) -> None:
    torch.save(OPTIMIZER, tmp_path / "o.pt")
    (tmp_path / "o.pt").chmod(0)
    assert "Permission denied" in refused(tmp_path / "o.pt")


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({"w": torch.ones(2), "b": torch.ones(1)}, "it holds weights, 2 tensors"),
        ({"model": {}, "epoch": 3}, "its keys are 'model', 'epoch'"),
        ({}, "it is empty"),
        (torch.ones(3), "it is a tensor"),
        ([1, 2], "it is a list of something else"),
    ],
    ids=str,
)
def test_a_file_without_an_optimizer_says_what_it_holds(held: Any, said: str, tmp_path: Path) -> None:
    torch.save(held, tmp_path / "o.pt")
    assert said in refused(tmp_path / "o.pt")


def test_weights_in_safetensors_are_named_as_what_they_are(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    assert "is a safetensors file: it holds weights" in refused(tmp_path / "model.safetensors")

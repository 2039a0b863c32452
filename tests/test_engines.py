"""Three engines, one result."""

from __future__ import annotations

import copy

import pytest
import torch

from effcli.data.batches import Collator
from effcli.engines.window import WindowLoss, count_items, windows
from effcli.optim import registry
from effcli.spec import OptimSpec
from tests.jobs import ENGINES, Outcome, rows, run_job, tiny_model

TASKS = ("classification", "causal-lm", "regression", "seq2seq")
OPTIMIZERS = ("adamw", "adafactor", "adam8bit", "sgd")


def adamw(groups):
    return torch.optim.AdamW(groups, lr=1e-3)


def largest_difference(one: Outcome, other: Outcome) -> float:
    return max((one.weights[name] - other.weights[name]).abs().max().item() for name in one.weights)


def assert_same_run(one: Outcome, other: Outcome, *, weights: float) -> None:
    assert one.losses == pytest.approx(other.losses, rel=1e-6)
    assert one.grad_norms == pytest.approx(other.grad_norms, rel=1e-6)
    assert one.rates == pytest.approx(other.rates, rel=1e-12)
    assert largest_difference(one, other) <= weights


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("task", TASKS)
def test_all_engines_give_the_same_losses_norms_rates_and_weights(task: str, dropout: float) -> None:
    # 11 rows in batches of 2 and windows of 2: uneven lengths, a batch of one row, and two epochs.
    outcomes = [
        run_job(engine, task, num_rows=11, batch_size=2, accum=2, epochs=2, dropout=dropout, warmup=1)
        for engine in ENGINES
    ]
    assert len(outcomes[0].losses) == 6
    for outcome in outcomes[1:]:
        assert_same_run(outcomes[0], outcome, weights=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_optimizer_means_the_same_weights_and_state_in_all_engines(name: str) -> None:
    entry = registry.find(name)
    hyper = registry.resolve_hyper(entry, OptimSpec(name=name, lr=1e-3, min_8bit_size=256 if entry.eight_bit else None))
    states = []
    outcomes = []
    for engine in ENGINES:
        kept = []
        outcomes.append(
            run_job(
                engine, "classification", num_rows=10, batch_size=2, accum=2,
                make_optimizer=lambda groups, kept=kept: kept.append(entry.build(groups, hyper)) or kept[0],
            )
        )  # fmt: skip
        tensors = [
            value for state in kept[0].state.values() for value in state.values() if isinstance(value, torch.Tensor)
        ]
        states.append((sorted(str(value.dtype) for value in tensors), sum(value.nbytes for value in tensors)))
    assert states[0] == states[1] == states[2]
    for outcome in outcomes[1:]:
        assert_same_run(outcomes[0], outcome, weights=0.01 * 1e-3 * len(outcome.losses))


def test_averaging_micro_batch_means_would_be_noticed() -> None:
    model, made = tiny_model("causal-lm"), rows(6, "causal-lm")
    collate = Collator(0, "right", "causal-lm")
    whole = model(**collate(made)).loss.item()
    naive = (model(**collate(made[:3])).loss.item() + model(**collate(made[3:])).loss.item()) / 2
    assert abs(naive - whole) / whole > 1e-4


@pytest.mark.parametrize("engine", ENGINES)
def test_a_short_last_window_is_divided_by_what_it_holds(engine: str) -> None:
    same_row = rows(1, "classification") * 10
    outcome = run_job(
        engine, "classification", num_rows=10, batch_size=2, accum=2, made_rows=same_row,
        make_optimizer=lambda groups: torch.optim.SGD(groups, lr=0.0),
    )  # fmt: skip
    assert outcome.losses == pytest.approx([outcome.losses[0]] * 3, rel=1e-6)
    assert outcome.grad_norms == pytest.approx([outcome.grad_norms[0]] * 3, rel=1e-6)


@pytest.mark.parametrize(("accum", "rates"), [(5, [1.0, 0.5]), (4, [1.0, 0.6667, 0.3333])])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_schedule_counts_updates(engine: str, accum: int, rates: list[float]) -> None:
    outcome = run_job(
        engine, "classification", num_rows=10, batch_size=1, accum=accum,
        make_optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0),
    )  # fmt: skip
    assert outcome.rates == pytest.approx(rates, abs=1e-4)


@pytest.mark.parametrize("max_steps", [2, 7])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_number_of_updates_ends_the_run_wherever_it_falls(engine: str, max_steps: int) -> None:
    outcome = run_job(engine, "classification", num_rows=10, batch_size=2, accum=2, max_steps=max_steps)
    assert len(outcome.losses) == max_steps


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
def test_clipping_happens_once_per_update_and_the_norm_is_that_before(max_grad_norm: float) -> None:
    outcomes = [
        run_job(engine, "classification", num_rows=8, batch_size=2, accum=2, max_grad_norm=max_grad_norm)
        for engine in ENGINES
    ]
    assert max(outcomes[0].grad_norms) > 0.05
    for outcome in outcomes[1:]:
        assert_same_run(outcomes[0], outcome, weights=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
def test_low_precision_is_the_same_in_all_engines(precision: str) -> None:
    outcomes = []
    for engine in ENGINES:
        model = tiny_model("causal-lm")
        model = model.to(torch.bfloat16) if precision == "bf16-pure" else model
        outcomes.append(
            run_job(engine, "causal-lm", num_rows=8, batch_size=2, accum=2, model=model, precision=precision)
        )
    full = run_job("pytorch", "causal-lm", num_rows=8, batch_size=2, accum=2)
    assert outcomes[0].losses != full.losses
    assert outcomes[0].losses == pytest.approx(full.losses, rel=2e-2)
    for outcome in outcomes[1:]:
        assert_same_run(outcomes[0], outcome, weights=1e-6)
    kind = torch.bfloat16 if precision == "bf16-pure" else torch.float32
    assert all(weight.dtype == kind for weight in outcomes[0].weights.values())


@pytest.mark.parametrize("engine", ENGINES)
def test_the_model_is_handed_back_without_autocast(engine: str) -> None:
    outcome = run_job(engine, "classification", num_rows=4, batch_size=2, accum=1, precision="bf16")
    plain = tiny_model("classification")
    plain.load_state_dict(outcome.weights)
    batch = Collator(0, "right", "classification")(rows(4, "classification"))
    with torch.no_grad():
        assert torch.equal(outcome.model.eval()(**batch).logits, plain.eval()(**batch).logits)


@pytest.mark.parametrize("start", [3, 5])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_goes_on_from_any_update_bit_for_bit(engine: str, start: int) -> None:
    settings = {"num_rows": 11, "batch_size": 2, "accum": 2, "epochs": 2, "make_optimizer": adamw}
    whole = run_job(engine, "classification", **settings)
    kept = {}

    def keep(model, optimizer, schedule) -> None:
        kept.update(model=model, optimizer=optimizer, schedule=schedule)

    model = tiny_model("classification")
    # The first part runs to `start` under the schedule of the whole run, as an interrupted run does.
    run_job(
        "pytorch", "classification", **settings | {"max_steps": start}, model=model,
        prepare=lambda *parts: (keep(*parts), _use_schedule_of(parts[2], total=6)),
    )  # fmt: skip
    state = (copy.deepcopy(kept["optimizer"].state_dict()), copy.deepcopy(kept["schedule"].state_dict()))

    def restore(model, optimizer, schedule) -> None:
        optimizer.load_state_dict(state[0])
        schedule.load_state_dict(state[1])

    rest = run_job(engine, "classification", **settings, model=model, start=start, prepare=restore)
    assert rest.losses == whole.losses[start:]
    assert rest.rates == whole.rates[start:]
    assert largest_difference(rest, whole) == 0.0


def _use_schedule_of(schedule, *, total: int) -> None:
    schedule.lr_lambdas = [lambda step: max(0.0, (total - step) / total) for _ in schedule.lr_lambdas]


@pytest.mark.parametrize("engine", ENGINES)
def test_worker_processes_change_nothing(engine: str) -> None:
    alone = run_job(engine, "classification", num_rows=9, batch_size=2, accum=2, dropout=0.1)
    helped = run_job(engine, "classification", num_rows=9, batch_size=2, accum=2, dropout=0.1, num_workers=2)
    assert_same_run(alone, helped, weights=0.0)


def test_the_loss_of_a_window_weighs_tokens_alike() -> None:
    # Two micro-batches with loss sums 3.0 over 1 token and 8.0 over 4 tokens: 11 / 5, not (3 + 2) / 2.
    class Sums(WindowLoss):
        def total(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return logits

    loss = Sums("causal-lm")
    shares = [loss.scaled(torch.tensor(total), torch.empty(0), 5) for total in (3.0, 8.0)]
    assert float(sum(shares)) == pytest.approx(2.2)


def test_items_are_rows_or_predicted_tokens() -> None:
    assert count_items(torch.tensor([0, 1, 1])) == 3
    assert count_items(torch.tensor([0.5, 2.5])) == 2
    assert count_items(torch.tensor([[-100, 5, 6], [-100, 7, -100]])) == 3
    assert [len(window) for window in windows(iter([{}] * 5), 2)] == [2, 2, 1]

"""`check_policy` finds what it is for: each kind of bad policy, by name of the fault."""

from __future__ import annotations

import itertools
import logging
import random

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from aioserve import SchedulingPolicy, Verdict
from aioserve.scheduling.policy_calls import WAYS_TO_PREEMPT
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan
from aioserve.testing import check_policy, policy_check
from aioserve.testing.fake_device import FakeDevice
from aioserve.testing.policy_workloads import Workload, workloads
from tests.tiers import examples


@pytest.fixture(autouse=True)
def _the_first_workload_that_fails_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the time goes to the search for a smaller one."""
    monkeypatch.setattr(policy_check, "MAX_SMALLER_WORKLOADS", 0)
    monkeypatch.setattr(policy_check, "MAX_SMALLER_RUSHES", 0)


class FirstCome(SchedulingPolicy):
    """Declares that nobody is overtaken."""

    def starvation_bound_tokens(self, request):
        return 0


class LastCome(FirstCome):
    def order(self, waiting, view):
        return reversed(waiting)


class Shortest(SchedulingPolicy):
    """Long prompts wait for as long as short ones come, and never for more than is declared."""

    def starvation_bound_tokens(self, request):
        return 4 * request.prompt_tokens

    def order(self, waiting, view):
        return sorted(waiting, key=lambda request: request.uncached_tokens)


class NeverAges(Shortest):
    """Keeps its promise until others have kept coming for long."""

    def starvation_bound_tokens(self, request):
        return 64 * request.prompt_tokens


class Waits(SchedulingPolicy):
    async def arrived(self, requests):
        pass


def test_an_async_method_is_no_answer() -> None:
    with pytest.raises(AssertionError, match=r"Waits\.arrived must be a plain function"):
        check_policy(Waits)


class FavoursATenant(SchedulingPolicy):
    def starvation_bound_tokens(self, request):
        return 500

    def order(self, waiting, view):
        return sorted(waiting, key=lambda request: request.tenant == "b")


class Drops(FirstCome):
    """Leaves one request out for as long as there is another."""

    def order(self, waiting, view):
        return [request for request in waiting if request.arrival_index != 2]


class PutsOff(FirstCome):
    def admit(self, request, view):
        return Verdict.LATER if request.arrival_index == 2 else Verdict.NOW


class GivesNoTokens(FirstCome):
    def chunk(self, request, budget_tokens, view):
        return 0 if request.arrival_index == 2 and not request.pages else budget_tokens


class Repeats(SchedulingPolicy):
    def order(self, waiting, view):
        return [*waiting, *waiting[:1]]


class Raises(SchedulingPolicy):
    def admit(self, request, view):
        if view.num_running > 1:
            raise KeyError("planted")
        return Verdict.NOW


class RaisesWhenTold(SchedulingPolicy):
    def finished(self, requests):
        raise KeyError("planted")


class HasItThatTimeStandsStill(SchedulingPolicy):
    def order(self, waiting, view):
        if any(request.arrival_seconds > 0.05 for request in waiting):
            raise KeyError("planted")
        return waiting


class HasItThatNobodyLeaves(SchedulingPolicy):
    def finished(self, requests):
        if any(request.generated_tokens == 0 for request in requests):
            raise KeyError("planted")


class HasItThatTargetsAreRare(SchedulingPolicy):
    def arrived(self, requests):
        if all(request.tpot_target_seconds for request in requests):
            raise KeyError("planted")


class HasItThatMetadataIsNumbers(SchedulingPolicy):
    def order(self, waiting, view):
        return sorted(waiting, key=lambda request: int(request.metadata.get("tier", 0)))


class HasItThatMetadataIsThere(SchedulingPolicy):
    def arrived(self, requests):
        for request in requests:
            request.metadata["kind"]


class OverBudget(SchedulingPolicy):
    def chunk(self, request, budget_tokens, view):
        return max(budget_tokens, 2)


class NamesAnOutsider(SchedulingPolicy):
    def victim(self, running, need_pages, view):
        return None


class Remembers(SchedulingPolicy):
    """Names a request that was waiting once."""

    def __init__(self):
        self.seen = None

    def order(self, waiting, view):
        self.seen = self.seen or waiting[0]
        return [self.seen]


class Random(SchedulingPolicy):
    def order(self, waiting, view):
        return random.SystemRandom().sample(waiting, len(waiting))


class CountsItsObjects(SchedulingPolicy):
    """State of the class: the second run isn't like the first."""

    numbers = itertools.count()

    def __init__(self):
        self.number = next(self.numbers)

    def chunk(self, request, budget_tokens, view):
        return max(1, budget_tokens - self.number % 3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (LastCome, "starvation: sequence .* starvation_bound_tokens declares 0"),
        (Shortest, "starvation: sequence .* has waited for"),
        (NeverAges, "starvation: sequence .* starvation_bound_tokens declares"),
        (FavoursATenant, "starvation: sequence .* starvation_bound_tokens declares 500"),
        (Drops, "starvation"),
        (PutsOff, "starvation"),
        (GivesNoTokens, "starvation"),
        (Repeats, "Repeats: order named .* doesn't wait or came before"),
        (Raises, r"Raises: admit raised KeyError\('planted'\)"),
        (RaisesWhenTold, "RaisesWhenTold: finished raised KeyError"),
        (HasItThatTimeStandsStill, "order raised KeyError"),
        (HasItThatNobodyLeaves, "finished raised KeyError"),
        (HasItThatTargetsAreRare, "arrived raised KeyError"),
        (HasItThatMetadataIsNumbers, "order raised ValueError"),
        (HasItThatMetadataIsThere, r"arrived raised KeyError\('kind'\)"),
        (OverBudget, "OverBudget: chunk answered 2"),
        (NamesAnOutsider, "NamesAnOutsider: victim answered None"),
        (Remembers, "Remembers: order named"),
        (Random, "not deterministic: plan"),
        (CountsItsObjects, "not deterministic: plan"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_bad_policy_is_found_and_told_apart(policy, message):
    with pytest.raises(AssertionError, match=message):
        check_policy(policy)


NONSENSE = {
    "order": lambda waiting, view: [None],
    "admit": lambda request, view: None,
    "chunk": lambda request, budget_tokens, view: -1,
    "victim": lambda running, need_pages, view: None,
    "precedence": lambda request: 0.5,
    "displaces": lambda request, running, view: [request],
    "preempt": lambda running, view: [None],
    "begin_step": lambda view: [None],
    "order_prefills": lambda running, view: [None],
    "decode": lambda running, view: [None],
    "reserve": lambda request, view: -1,
    "draft": lambda request, limit, view: limit + 1,
    "drop": lambda request, view: False,
    "pin": lambda request: -1,
    "unpin": lambda pins, view: [None],
}
SO_THAT_IT_IS_ASKED = {
    "displaces": {"precedence": lambda request: request.priority},
    "unpin": {"pin": lambda request: request.computed_tokens},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("question", NONSENSE)
def test_every_question_is_asked_and_its_answer_looked_at(question):
    methods = {question: NONSENSE[question], **SO_THAT_IT_IS_ASKED.get(question, {})}
    members = {name: staticmethod(method) for name, method in methods.items()}
    with pytest.raises(AssertionError, match=f"Odd: {question} (answered|named)"):
        check_policy(type("Odd", (SchedulingPolicy,), members), max_examples=40)


def test_no_question_is_left_out():
    told = {"arrived", "step_finished", "finished", "starvation_bound_tokens"}
    public = {name for name in vars(SchedulingPolicy) if not name.startswith("_")}
    assert NONSENSE.keys() == public - told - {"victim_of_any_age"}


class Legal(SchedulingPolicy):
    """Unfair and slow, as a policy may be: it declares nothing."""

    def __init__(self):
        self.random = random.Random(4)

    def order(self, waiting, view):
        return self.random.sample(waiting, self.random.randint(0, len(waiting)))

    def admit(self, request, view):
        return self.random.choice(list(Verdict))

    def chunk(self, request, budget_tokens, view):
        return self.random.randint(0, budget_tokens)

    def victim(self, running, need_pages, view):
        return self.random.choice(running)


def test_pages_go_to_the_host_and_back_in_some_workloads(monkeypatch: pytest.MonkeyPatch):
    kinds: set[tuple[int, int]] = set()
    execute = FakeDevice.execute

    def noted(device: FakeDevice, plan: StepPlan) -> StepOutcome:
        kinds.update((copy.from_tier, copy.to_tier) for copy in plan.copies)
        assert kinds < {(0, 0), (0, 1), (1, 0)}, "all kinds were there"
        return execute(device, plan)

    monkeypatch.setattr(FakeDevice, "execute", noted)
    with pytest.raises(AssertionError, match="all kinds were there"):
        check_policy(SchedulingPolicy, max_examples=200)


@pytest.mark.parametrize("rush", [False, True])
def test_the_same_seed_draws_the_same_workloads_with_metadata_and_without(rush: bool):
    def drawn(number: int) -> list[Workload]:
        found: list[Workload] = []

        @seed(number)
        @settings(max_examples=30, database=None, phases=[Phase.generate])
        @given(workloads(rush=rush))
        def collect(workload: Workload) -> None:
            found.append(workload)

        collect()
        return found

    first, second = drawn(1), drawn(2)
    assert first == drawn(1) != second
    both = [*first, *second]
    drawn_metadata = {bool(r.hints.metadata) for one in both for r in one.requests}
    assert drawn_metadata == {False, True}
    assert {bool(one.num_host_pages) for one in both} == {False, True}
    assert {one.preemption for one in both if one.num_host_pages} == set(WAYS_TO_PREEMPT)
    assert {bool(r.max_draft_tokens) for one in both for r in one.requests} == {False, True}


@pytest.mark.parametrize("policy", [SchedulingPolicy, FirstCome, Legal])
def test_a_policy_that_keeps_the_contract_passes(policy):
    check_policy(policy, max_examples=examples(40))


@pytest.mark.parametrize("bound", [-5, 7.5, float("nan"), True, "7"])
def test_a_bound_that_is_no_number_of_tokens_is_found_though_nobody_is_overtaken(bound):
    class Promises(SchedulingPolicy):
        def starvation_bound_tokens(self, request):
            return bound

    with pytest.raises(AssertionError, match=r"starvation_bound_tokens answered .*, not an int"):
        check_policy(Promises, max_examples=10)


def test_a_fault_is_found_where_nothing_is_logged():
    logging.disable(logging.CRITICAL)
    try:
        with pytest.raises(AssertionError, match="Raises: admit raised KeyError"):
            check_policy(Raises)
    finally:
        logging.disable(logging.NOTSET)


class Patient(FirstCome):
    def starvation_bound_tokens(self, request):
        return 1_000_000

    def order(self, waiting, view):
        return sorted(waiting, key=lambda request: request.uncached_tokens)


def test_a_bound_that_no_workload_reaches_is_warned_of(monkeypatch: pytest.MonkeyPatch):
    """Many rushes are tried, since in most of them nobody waits until the end."""
    monkeypatch.setattr(policy_check, "RUSHES_PER_EXAMPLE", 4)
    monkeypatch.setattr(policy_check, "MAX_RUSH_TOKENS", 2_000)
    with pytest.warns(UserWarning, match="declares up to 1000000, and no more than 2000 tokens"):
        check_policy(Patient, max_examples=4)


def test_the_workload_that_shows_a_fault_comes_with_it_and_smaller_ones_are_looked_for(
    monkeypatch: pytest.MonkeyPatch,
):
    def length_of_what_shows_it() -> int:
        with pytest.raises(AssertionError, match=r"Repeats: order .*\nWorkload\(.*\)$") as caught:
            check_policy(Repeats)
        return len(str(caught.value))

    first = length_of_what_shows_it()
    monkeypatch.setattr(policy_check, "MAX_SMALLER_WORKLOADS", 60)
    assert length_of_what_shows_it() < first


def test_an_error_of_hypothesis_is_no_pass(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policy_check, "workloads", lambda rush: st.integers(2, 1))
    with pytest.raises(InvalidArgument):
        check_policy(FirstCome)


def test_it_takes_a_factory_of_new_objects():
    one = SchedulingPolicy()
    with pytest.raises(AssertionError, match="a new policy object with each call"):
        check_policy(lambda: one)
    with pytest.raises(AssertionError, match="must give a SchedulingPolicy, got 3"):
        check_policy(lambda: 3)  # pyright: ignore[reportArgumentType]

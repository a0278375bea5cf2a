"""Nano-Serving's phases 0 to 6 in our terms.

They are requests and batches, the pool of pages, prefill and decode, chunks, the radix cache,
continuous batching, and all of it. Its own tests of each are the models of these."""

from __future__ import annotations

import numpy as np
import pytest

from aioserve.kv.page_pool import OutOfPagesError, PagePool
from aioserve.ops.batch import HostBatch
from aioserve.steps.plan import PENDING_TOKEN, ItemKind
from aioserve.testing import expected_tokens
from tests.books.served import serve


class TestPhase0RequestsAndBatches:
    def test_a_request_goes_from_its_prompt_to_its_last_token(self) -> None:
        """`cached_len` is where an item starts, `extend_len` its count, `device_len` its end."""
        served = serve([[1, 2, 3, 4, 5]], 10)
        items = [plan.items[0] for plan in served.plans]
        assert [item.start for item in items] == [0, *range(5, 14)]
        assert [item.count for item in items] == [5, *[1] * 9]
        assert [item.end for item in items] == list(range(5, 15))
        assert items[0].kind is ItemKind.PREFILL
        assert {item.kind for item in items[1:]} == {ItemKind.DECODE}
        assert served.tokens == [tuple(expected_tokens([1, 2, 3, 4, 5], 10))]

    def test_a_batch_has_the_tokens_of_all_its_requests_in_a_row(self) -> None:
        served = serve([[1, 2, 3, 4], [5, 6, 7]], 2)
        prefill, decode = served.plans
        assert [item.token_ids.tolist() for item in prefill.items] == [[1, 2, 3, 4], [5, 6, 7]]
        last = [tokens[0] for tokens in served.tokens]
        ids = [item.token_ids.tolist() for item in decode.items]
        assert ids in ([[one] for one in last], [[PENDING_TOKEN]] * 2)
        assert [item.start for item in decode.items] == [4, 3]

    def test_positions_and_locations_are_those_of_each_request(self) -> None:
        """`positions` and `out_loc` of a batch of 4 and 3 tokens, in pages of 4: 2 and 5."""
        table = np.array([[[2, 7], [5, 9]]], np.int32)
        batch = HostBatch.laid_out(np.array([4, 3]), np.array([4, 3]), table, 4)
        assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
        assert batch.token_locations.tolist() == [[8, 9, 10, 11, 20, 21, 22]]
        decode = HostBatch.laid_out(np.array([1, 1]), np.array([5, 4]), table, 4)
        assert decode.positions.tolist() == [4, 3]
        assert decode.token_locations.tolist() == [[28, 23]]


class TestPhase1Pages:
    def test_twenty_tokens_take_two_of_64_pages(self) -> None:
        served = serve([[7] * 20], 1, num_pages=64)
        assert served.stats[0].pages_held_by_requests == 2
        assert served.stats[0].pages_free == 62

    def test_pages_come_back_in_any_order(self) -> None:
        pool = PagePool(64, 16)
        two, three, one = (pool.acquire(count) for count in (2, 3, 1))
        assert pool.num_free == 58
        for freed, left in ((three, 61), (two, 63), (one, 64)):
            pool.release(freed, 0)
            pool.complete(0)
            assert pool.num_free == left

    def test_a_full_pool_says_so_and_gives_nothing(self) -> None:
        pool = PagePool(4, 16)
        pool.acquire(4)
        with pytest.raises(OutOfPagesError):
            pool.acquire(1)
        assert pool.num_held == 4

    def test_a_page_waits_for_the_step_that_touches_it(self) -> None:
        """The book leaves this out: a page that comes back is free once its last step is done."""
        pool = PagePool(4, 16)
        pages = pool.acquire(4)
        pool.release(pages, 3)
        assert (pool.num_free, pool.num_fenced) == (0, 4)
        pool.complete(3)
        assert (pool.num_free, pool.num_fenced) == (4, 0)


class TestPhase2PrefillAndDecode:
    def test_prompts_go_first_come_first_served_within_a_budget(self) -> None:
        """A budget of 100 takes 50, 30 and, unlike in the book, a chunk of 20 of the third."""
        prompts = [[n] * count for n, count in enumerate((50, 30, 40))]
        served = serve(prompts, 1, max_num_batched_tokens=100)
        assert served.counts == [{0: 50, 1: 30, 2: 20}, {2: 20}]

    def test_all_that_run_decode_in_one_step(self) -> None:
        served = serve([[number, 2, 3] for number in range(10)], 5)
        assert served.counts[0] == dict.fromkeys(range(10), 3)
        assert served.counts[1:] == [dict.fromkeys(range(10), 1)] * 4

    def test_one_step_has_decodes_and_a_prompt(self) -> None:
        """One planner: those that run keep their token a step, beside a prompt that comes."""
        served = serve([[1, 2, 3], [9] * 40], 8, later={1: 0.035})
        both = [counts for counts in served.counts if len(counts) == 2]
        assert both[0] == {0: 1, 1: 40}
        decodes = [counts for counts in served.counts if counts.get(0) == 1]
        assert len(decodes) == 7, "no step passes without its token"


class TestPhase3Chunks:
    def test_a_thousand_tokens_are_four_chunks(self) -> None:
        served = serve([[3] * 1000], 1, max_num_batched_tokens=256)
        assert served.counts == [{0: 256}, {0: 256}, {0: 256}, {0: 232}]

    def test_short_prompts_pass_a_long_one_in_turn(self) -> None:
        prompts = [[number] * count for number, count in enumerate((1000, 100, 140))]
        served = serve(prompts, 1, max_num_batched_tokens=512, policy="round_robin:chunk_size=256")
        assert set(served.counts[0]) == {0, 1, 2}
        assert all(set(counts) == {0} for counts in served.counts[1:])

    def test_chunks_leave_decodes_their_token(self) -> None:
        running, long = 4, 1000
        prompts = [*([number, 3] for number in range(running)), [9] * long]
        served = serve(prompts, 10, later={running: 0.015}, max_num_batched_tokens=256)
        chunks = [counts for counts in served.counts if running in counts]
        assert chunks[0] == {**dict.fromkeys(range(running), 1), running: 256 - running}
        assert served.tokens == [
            tuple(expected_tokens(prompt, 10, number)) for number, prompt in enumerate(prompts)
        ]


class TestPhase4RadixCache:
    SYSTEM = (1, 2, 3, 4, 5)
    QUERIES = ((10, 11, 12), (20, 21), (30, 31, 32, 33))

    def test_requests_share_what_they_begin_with(self) -> None:
        prompts = [[*self.SYSTEM, *query] for query in self.QUERIES]
        served = serve(prompts, 10, later={1: 1.0, 2: 2.0}, page_size=1)
        assert [usage.cached_tokens for usage in served.usages] == [0, 5, 5]

    def test_whole_pages_are_shared_while_they_are_computed(self) -> None:
        """All come at once, and one computes the 96 tokens that fill six pages."""
        system = list(range(100))
        prompts = [[*system, 200 + number, 7] for number in range(8)]
        served = serve(prompts, 2)
        assert served.counts[0] == {0: 102, **dict.fromkeys(range(1, 8), 6)}

    def test_the_least_recently_used_leave_for_those_that_come(self) -> None:
        prompts = [[number] * 40 for number in (1, 2, 3, 1)]
        served = serve(prompts, 1, later={1: 1.0, 2: 2.0, 3: 3.0}, num_pages=80, page_size=1)
        assert [usage.cached_tokens for usage in served.usages] == [0, 0, 0, 0]
        assert served.stats[-1].pages_cached <= 80
        roomy = serve(prompts, 1, later={1: 1.0, 2: 2.0, 3: 3.0}, num_pages=160, page_size=1)
        assert roomy.usages[3].cached_tokens == 39
        assert roomy.tokens == served.tokens


class TestPhase5ContinuousBatching:
    def test_requests_wait_run_and_end(self) -> None:
        served = serve([[1, 2, 3]] * 3, 3, max_num_seqs=2)
        states = [(one.num_waiting, one.num_running) for one in served.stats]
        assert states[0] == (1, 2)
        assert states[-1] == (0, 0)

    def test_one_joins_while_others_run(self) -> None:
        served = serve([[number, 2, 3] for number in range(6)], 6, later={5: 0.025})
        assert 5 not in served.counts[0]
        joined = next(counts for counts in served.counts if 5 in counts)
        assert joined == {**dict.fromkeys(range(5), 1), 5: 3}

    def test_steps_are_those_of_the_longest_or_of_the_seats(self) -> None:
        """20 requests, a third of 5 tokens and the others of 20, with 20 seats and with 4."""
        lengths = [5 if number % 3 == 0 else 20 for number in range(20)]
        prompts = [[number, 2, 3] for number in range(20)]
        assert len(serve(prompts, lengths).counts) == 20
        few = serve(prompts, lengths, max_num_seqs=4)
        assert sum(lengths) / 4 <= len(few.counts) < 5 * 20


class TestPhase6AllOfIt:
    def test_thirty_two_requests_behind_one_system_prompt(self) -> None:
        """The book asks for 15 tokens a step, and half of the prompt tokens found. It doesn't ask
        for the tokens that each request has alone."""
        system = list(range(100))
        prompts = [[*system, *[number] * 10] for number in range(32)]
        served = serve(prompts, 20, max_num_seqs=32, max_num_batched_tokens=512)
        last = served.stats[-1]
        assert 32 * 20 / len(served.plans) > 15
        found = last.tokens_cached_total
        assert found / (found + last.tokens_prefilled_total) > 0.5
        assert last.pages_held_by_requests == 0
        assert served.tokens == [
            tuple(expected_tokens(prompt, 20, number)) for number, prompt in enumerate(prompts)
        ]

    @pytest.mark.parametrize("speculation", [None, "ngram"])
    def test_answers_of_two_lengths_have_their_tokens(self, speculation: str | None) -> None:
        prompts = [[number] * 10 for number in range(10)]
        lengths = [5 if number % 2 == 0 else 20 for number in range(10)]
        served = serve(prompts, lengths, overlap=True, speculation=speculation)
        assert served.tokens == [
            tuple(expected_tokens(prompt, count, number))
            for number, (prompt, count) in enumerate(zip(prompts, lengths, strict=True))
        ]

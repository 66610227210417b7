"""The engine as its callers meet it: stops, aborts, errors, sessions, broken weights."""

import asyncio
import gc
from pathlib import Path

import pytest
import torch

from engine import EngineConfig
from engine.engine import Engine
from engine.errors import BadModel, BadRequest, BadSetting, NotAdmitted, SessionBroken, UnknownSession
from engine.sampling import Sampling
from tests.engine.model.parity import make_checkpoint, named
from tests.engine.model.tiny_models import random_tensors, write_checkpoint
from tests.engine.runs import collect, greedy, run, small

DEMO = Path(__file__).resolve().parents[2] / "engine" / "demo_model"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "shared")


def demo_config(**settings: object) -> EngineConfig:
    return EngineConfig(**{"host_memory_bytes": 64 << 20, "hot_rows": 256, **settings})  # type: ignore[arg-type]


async def test_text_in_text_out() -> None:
    """The demo model continues a text; the pieces join to what its tokens decode to; usage counts both sides."""
    async with Engine.open(DEMO, demo_config()) as engine:
        got = await engine.generate("import os\nimport sys\n\n", Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)).complete()
        assert got.text == engine.tokenizer.decode(got.token_ids)
        assert got.usage.completion_tokens == len(got.token_ids) == 12
        assert got.usage.prompt_tokens == len(engine.tokenizer.encode("import os\nimport sys\n\n"))
        assert got.finish_reason == "length"


async def test_a_stop_string_across_tokens_ends_the_text_before_it() -> None:
    """Whatever two tokens join to stops the generation, is not in the text, and is named."""
    async with Engine.open(DEMO, demo_config()) as engine:
        plain = await engine.generate("def f(", Sampling(max_tokens=10, temperature=0.0, ignore_eos=True)).complete()
        pieces = [engine.tokenizer.token_text(token) for token in plain.token_ids]
        stop = pieces[3][-1:] + pieces[4][:1]
        cut = plain.text.find(stop)
        sampling = Sampling(max_tokens=10, temperature=0.0, ignore_eos=True, stop=(stop,))
        chunks = [chunk async for chunk in engine.generate("def f(", sampling)]
        assert "".join(chunk.text for chunk in chunks) == plain.text[:cut]
        assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", stop)


async def test_seeded_sampling_repeats_and_seeds_differ() -> None:
    """The same seed gives the same tokens, alone or in company; another seed gives others."""
    sampling = [Sampling(max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True) for seed in (1, 2, 1)]
    async with Engine.open(DEMO, demo_config()) as engine:
        together = await asyncio.gather(*(engine.generate("import ", one).complete() for one in sampling))
        alone = await engine.generate("import ", sampling[0]).complete()
    tokens = [one.token_ids for one in together]
    assert tokens[0] == tokens[2] == alone.token_ids
    assert tokens[0] != tokens[1]


async def test_penalties_change_the_choice_and_leave_no_trace() -> None:
    """A strong repetition penalty keeps greedy decoding from repeating; the next request of the session is not penalised."""
    prompt = [5] * 20
    async with Engine.open(DEMO, demo_config()) as engine:
        strong = Sampling(max_tokens=15, temperature=0.0, repetition_penalty=100.0, ignore_eos=True)
        penalised = await engine.generate(prompt, strong).complete()
        assert len(set(penalised.token_ids)) == 15
        assert 5 not in penalised.token_ids
        plain = Sampling(max_tokens=15, temperature=0.0, ignore_eos=True)
        before = await engine.generate(prompt, plain).complete()
        assert before.token_ids != penalised.token_ids
        session = await engine.create_session()
        first = await engine.generate(prompt, strong, session=session).complete()
        after = await engine.generate([7], plain, session=session).complete()
        fresh = await engine.generate([*prompt, *first.token_ids, 7], plain).complete()
        assert after.token_ids == fresh.token_ids


async def test_logprobs_are_the_models_own() -> None:
    """The chosen token's logprob is its log-softmax under the raw logits, the best five come first to last, and greedy picks the first."""
    sampling = Sampling(max_tokens=5, temperature=0.0, logprobs=5, keep_logits=True, ignore_eos=True)
    async with Engine.open(DEMO, demo_config()) as engine:
        async for chunk in engine.generate("class A:\n", sampling):
            (logits,), (one,) = chunk.logits, chunk.logprobs
            expected = torch.log_softmax(logits.double(), -1)
            assert one.logprob == pytest.approx(float(expected[one.token_id]), abs=1e-4)
            assert [top.logprob for top in one.top] == pytest.approx(expected.topk(5).values.tolist(), abs=1e-4)
            assert one.top[0].token_id == one.token_id == chunk.token_ids[0]


@pytest.mark.parametrize("how", ["aclose", "leave", "drop"])
async def test_leaving_stops_within_one_step(checkpoint: Path, how: str) -> None:
    """However the caller leaves, the request runs at most one more step and its memory is given back."""
    async with Engine.open(checkpoint, small(hot_rows=16)) as engine:
        generation = engine.generate([1, 2, 3], greedy(500))
        await anext(generation)
        await anext(generation)
        seen = engine.statistics().steps
        if how == "aclose":
            await generation.aclose()
        elif how == "leave":
            async with generation:
                pass
        else:
            del generation
            gc.collect()
        await engine._loop.wait_idle()
        # One step may be in flight when the caller leaves, and one more submitted before the loop looks.
        assert engine.statistics().steps <= seen + 2
        assert engine.statistics().sessions == 0
        assert engine._stage.arena.statistics().references == 0
        assert (await engine.generate([1, 2, 3], greedy(3)).complete()).usage.completion_tokens == 3


async def test_an_abort_keeps_the_session(checkpoint: Path) -> None:
    """After an abort the session holds what was generated and continues as if those tokens had been its prompt."""
    async with Engine.open(checkpoint, small(hot_rows=16)) as engine:
        session = await engine.create_session()
        got: list[int] = []
        async with engine.generate([1, 2, 3, 4], greedy(100), session=session) as generation:
            async for chunk in generation:
                got.extend(chunk.token_ids)
                if len(got) == 9:
                    break
        kept = list(engine._sessions[session].tokens[4:])
        assert kept[:9] == got
        assert len(kept) <= 11
        more = await engine.generate([7, 8], greedy(5), session=session).complete()
        fresh = await engine.generate([1, 2, 3, 4, *kept, 7, 8], greedy(5)).complete()
        assert more.token_ids == fresh.token_ids
        assert more.usage.cached_tokens >= 4 + 8


async def test_an_abort_while_appending_keeps_finished_chunks(checkpoint: Path) -> None:
    """Leaving while the prompt is read gives the session whole chunks or nothing, and its next turn is right."""
    prompt = [(7 * place) % 60 for place in range(700)]
    async with Engine.open(checkpoint, small(append_chunk_rows=64, hot_rows=16)) as engine:
        session = await engine.create_session()
        generation = engine.generate(prompt, greedy(5), session=session)
        async with generation:
            while generation.progress.rows_done < 128:  # noqa: ASYNC110 - a count that moves with the loop, not an event
                await asyncio.sleep(0)
        held = engine._sessions[session]
        assert held.rows % 64 == 0
        assert 128 <= held.rows < 700
        assert list(held.tokens) == prompt[: held.rows]
        rest = await engine.generate(prompt[held.rows :], greedy(5), session=session).complete()
        fresh = await engine.generate(prompt, greedy(5)).complete()
        assert rest.token_ids == fresh.token_ids


async def test_bad_prompts_are_named(checkpoint: Path) -> None:
    """An empty prompt, an id outside the vocabulary, a context too long, an unknown session: BadRequest at the first await."""
    async with Engine.open(checkpoint, small(context_max=128)) as engine:
        vocabulary = int(named("shared").config["vocab_size"])
        cases = [
            ([], greedy(1), "no tokens"),
            ([vocabulary], greedy(1), f"token id {vocabulary} is outside"),
            ([1] * 128, greedy(1), "exceed the context of 128"),
            ([1], greedy(128), "exceed the context of 128"),
            ([-1], greedy(1), "token id -1 is outside"),
        ]
        for prompt, sampling, message in cases:
            with pytest.raises(BadRequest, match=message):
                await anext(engine.generate(prompt, sampling))
        with pytest.raises(UnknownSession):
            await anext(engine.generate([1], greedy(1), session="nobody"))  # type: ignore[arg-type]
        with pytest.raises(BadModel, match=r"tokenizer\.json"):
            await anext(engine.generate("text", greedy(1)))
        assert (await engine.generate([1] * 127, greedy(1)).complete()).finish_reason == "length"


async def test_what_never_fits_is_refused_with_the_bytes(checkpoint: Path) -> None:
    """A context larger than the whole arena is refused with what is missing; a small one still runs."""
    async with Engine.open(checkpoint, small(host_memory_bytes=1 << 20, hot_rows=16)) as engine:
        with pytest.raises(NotAdmitted, match=r"\d+ bytes of host memory missing"):
            await anext(engine.generate([1], greedy(3900)))
        assert (await engine.generate([1], greedy(2)).complete()).finish_reason == "length"


async def test_requests_wait_for_memory_and_then_run(checkpoint: Path) -> None:
    """Requests that fit one at a time all finish, in order of arrival."""
    async with Engine.open(checkpoint, small(host_memory_bytes=1 << 20, hot_rows=16)) as engine:
        order: list[int] = []
        blocks = engine._stage.arena.statistics().blocks
        tokens = blocks * 64 * 2 // 3

        async def one(number: int) -> None:
            generation = engine.generate([number + 1] * (tokens - 4), greedy(4))
            await generation.complete()
            order.append(number)

        await asyncio.gather(*(one(number) for number in range(3)))
        assert order == [0, 1, 2]


async def test_a_full_queue_says_when_to_come_back(checkpoint: Path) -> None:
    """Past `waiting_max` a request is refused at once, with a time to retry."""
    async with Engine.open(checkpoint, small(waiting_max=0)) as engine:
        with pytest.raises(NotAdmitted, match="waiting already") as caught:
            await anext(engine.generate([1], greedy(1)))
        assert caught.value.retry_after_s is not None
        assert caught.value.status == 429


@pytest.mark.parametrize(
    ("tensor", "named_place"),
    [("model.layers.2.mlp.shared_experts.down_proj.weight", "layer 2"), ("lm_head.weight", "the output head")],
)
async def test_a_value_that_is_not_finite_names_its_layer(tmp_path: Path, tensor: str, named_place: str) -> None:
    """NaN out of one layer ends the request with that layer's name; the engine goes on serving."""
    config = named("shared").config
    tensors = random_tensors(config, 3)
    tensors[tensor] = torch.full_like(tensors[tensor], float("nan"))
    directory = write_checkpoint(tensors, config, tmp_path / "broken")
    async with Engine.open(directory, small(hot_rows=16)) as engine:
        for _ in range(2):
            with pytest.raises(SessionBroken, match=named_place):
                await engine.generate([1, 2, 3], greedy(4)).complete()
        assert engine.ready
        assert engine.statistics().sessions == 0


async def test_a_value_that_breaks_while_decoding_ends_that_request_only(checkpoint: Path) -> None:
    """One session's poisoned hidden row breaks it at its next step; its neighbour's tokens are those of a run alone."""
    async with Engine.open(checkpoint, small(hot_rows=16)) as engine:
        alone = await collect(engine, [([9, 8, 7], 12)])
        victim = engine.generate([1, 2, 3], greedy(200))
        neighbour = asyncio.ensure_future(collect(engine, [([9, 8, 7], 12)]))
        await anext(victim)
        memory = next(request.session.memory for request in engine._loop.decoding if list(request.appended) == [1, 2, 3])
        assert memory is not None
        assert memory.ring is not None
        memory.ring.buffer.fill_(0xFF)  # f32 NaN in every ring row
        with pytest.raises(SessionBroken, match="not finite"):
            async for _ in victim:
                pass
        assert (await neighbour).same_bits(alone)


async def test_mtp_rows_are_kept_and_do_not_depend_on_the_way(checkpoint: Path) -> None:
    """The MTP layer's rows and keys of decoded positions equal those an append of the same tokens writes; slot 0 is empty."""
    from memory import barrier

    async with Engine.open(checkpoint, small(hot_rows=16)) as engine:
        first = await engine.create_session()
        tokens = [3, 1, 4]
        async for chunk in engine.generate(tokens, greedy(80), session=first):
            tokens = [*tokens, *chunk.token_ids]
        second = await engine.create_session()
        async for _ in engine.generate(tokens[:-1], greedy(1), session=second):
            pass
        layout, layer = engine._stage.layout, engine._stage.mtp_layer
        rows = []
        for session in (first, second):
            memory = engine._sessions[session].memory
            assert memory is not None
            await memory.operations.settle()
            assert memory.counts.logical == 82
            await barrier(memory, engine._stage.copyback)
            blocks = torch.stack([memory.mirror_block(block).view(torch.float32) for block in range(2)])
            start = layout.row_offset(layer) // 4
            rows.append(blocks[:, start : start + layout.layer_bytes // 4].reshape(-1, layout.row.row_bytes // 4)[:82].clone())
        assert not rows[0][0].any()
        assert rows[0][1:].abs().sum(-1).min() > 0
        torch.testing.assert_close(rows[0], rows[1], atol=1e-4, rtol=1e-4)


async def test_an_error_of_the_callers_own_leaves_unwrapped(checkpoint: Path) -> None:
    """An exception raised inside the block comes out as itself, and everything is closed."""

    async def fail() -> None:
        async with Engine.open(checkpoint, small()) as engine:
            await engine.create_session()
            await anext(engine.generate([1], greedy(50)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()


async def test_draining_refuses_new_requests_and_finishes_old_ones(checkpoint: Path) -> None:
    """While draining a running generation ends by itself and a new one is refused; a drain without time aborts."""
    async with Engine.open(checkpoint, small()) as engine:
        running = engine.generate([1], greedy(6))
        await anext(running)
        draining = asyncio.ensure_future(engine.drain(60.0))
        await asyncio.sleep(0)
        with pytest.raises(NotAdmitted, match="draining"):
            await anext(engine.generate([1], greedy(1)))
        assert [chunk.finish_reason async for chunk in running][-1] == "length"
        await draining
    async with Engine.open(checkpoint, small()) as engine:
        running = engine.generate([1], greedy(3000))
        await anext(running)
        await engine.drain(0.0)
        assert [chunk.finish_reason async for chunk in running][-1] == "abort"


async def test_settings_that_cannot_be_are_refused(checkpoint: Path) -> None:
    """A device that is not there, and a missing model, are one clear line."""
    with pytest.raises(BadSetting, match="cuda"):
        async with Engine.open(checkpoint, small(device="cuda")):
            pass
    with pytest.raises(BadModel):
        async with Engine.open(checkpoint / "nowhere"):
            pass


async def test_memory_goes_back_after_every_request(checkpoint: Path) -> None:
    """After sessions of many shapes the arena, the pool and the ledger hold what they held before the first."""
    async with Engine.open(checkpoint, small(hot_rows=16)) as engine:
        await collect(engine, [([1, 2], 3)])
        stage = engine._stage
        before = (stage.arena.statistics(), stage.pool.statistics(), stage.ledger.statistics())
        await asyncio.gather(*(collect(engine, [([1] * (50 * number + 1), 5), ([2] * 70, 66)]) for number in range(4)))
        assert (stage.arena.statistics(), stage.pool.statistics(), stage.ledger.statistics()) == before


async def test_one_run_equals_another(checkpoint: Path) -> None:
    """Two engines, one after the other, give the same bits: nothing of one run leaks into the next."""
    turns = [([5, 6, 7] * 30, 20)]
    first, second = await run(checkpoint, small(hot_rows=16), turns), await run(checkpoint, small(hot_rows=16), turns)
    assert first.same_bits(second)


async def test_a_request_behind_one_that_breaks_its_session_is_told(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests on one session: when the first breaks it the second fails too, at once, instead of waiting for ever."""
    async with Engine.open(checkpoint, small(hot_rows=16)) as engine:
        session = await engine.create_session()
        layer = engine._stage.model.layers[2]
        real = type(layer).feed_forward
        monkeypatch.setattr(type(layer), "feed_forward", lambda self, x: real(self, x) * (float("nan") if self.layer == 2 else 1.0))
        results = await asyncio.wait_for(
            asyncio.gather(*(engine.generate([1, 2], greedy(3), session=session).complete() for _ in range(2)), return_exceptions=True), 60
        )
        assert all(isinstance(result, SessionBroken) for result in results)


async def test_requests_on_a_session_that_closes_are_told() -> None:
    """A prompt still being tokenised when its session is closed is refused; a queued one ends."""
    async with Engine.open(DEMO, demo_config(context_max=60_000, host_memory_bytes=256 << 20)) as engine:
        session = await engine.create_session()
        asked = asyncio.ensure_future(engine.generate("#\n" * 20_000, Sampling(max_tokens=4), session=session).complete())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.close_session(session)
        with pytest.raises(BadRequest, match="closed"):
            await asyncio.wait_for(asked, 60)
        assert engine.statistics().waiting == 0


async def test_closing_beside_a_reader(checkpoint: Path) -> None:
    """`aclose` from other tasks, twice, ends while another task reads; the reader gets the last chunk; completing afterwards is refused."""
    async with Engine.open(checkpoint, small(hot_rows=16)) as engine:
        generation = engine.generate([1], greedy(2000))
        await anext(generation)

        async def read() -> str | None:
            reason = None
            async for chunk in generation:
                reason = chunk.finish_reason
            return reason

        reading = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(generation.aclose(), generation.aclose()), 60)
        assert await asyncio.wait_for(reading, 60) in ("abort", None)
        with pytest.raises(BadRequest, match="closed"):
            await generation.complete()


async def test_two_requests_of_a_session_share_its_context(checkpoint: Path) -> None:
    """The second is judged by what the first has left: it is refused when the session's tokens would exceed the context."""
    async with Engine.open(checkpoint, small(context_max=160)) as engine:
        session = await engine.create_session()
        first, second = await asyncio.gather(
            engine.generate([5] * 50, greedy(30), session=session).complete(),
            engine.generate([6] * 50, greedy(60), session=session).complete(),
            return_exceptions=True,
        )
        assert not isinstance(first, BaseException)
        assert isinstance(second, BadRequest)
        assert second.field == "max_tokens"
        assert len(engine._sessions[session].tokens) == 80
        third = await engine.generate([7] * 10, Sampling(temperature=0.0, ignore_eos=True), session=session).complete()
        assert third.usage.completion_tokens == 160 - 90


@pytest.mark.parametrize("prompt", [5, None, b"abc"])
async def test_prompts_of_no_known_form_are_refused(checkpoint: Path, prompt: object) -> None:
    """Something that is no text, no ids and no messages is a BadRequest naming the prompt."""
    async with Engine.open(checkpoint, small()) as engine:
        with pytest.raises(BadRequest, match="a prompt is a text"):
            await anext(engine.generate(prompt, greedy(1)))  # type: ignore[arg-type]

"""`Engine`: the public face. Opens a model, keeps sessions, starts generations.

Holds the stage, the step loop's task and the sessions by id. Knows no HTTP.

Invariants:
1. Everything the engine starts ends inside `Engine.open`'s block, but for what is on a device that failed: nothing of that is freed.
2. `generate` never waits; errors that make a request impossible come at the first await of the generation.
Source: design, sections 1 and 11.
"""

import asyncio
import functools
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from engine.archive.directory import place_of
from engine.archive.identity import identity_of
from engine.archive.transfers import Archives, Exported, TransferProgress
from engine.collector import old_objects_left_out
from engine.config import EngineConfig
from engine.defaults import default_sampling
from engine.device import check_device, device_of, leave, streams_of
from engine.errors import BadRequest, BadSetting, NeverFits, NotAdmitted
from engine.generation import Generation
from engine.grammar.compiled import Grammars
from engine.instruments import Instruments
from engine.local_stages import close_stages
from engine.loop import StepLoop
from engine.model.glm import Model, load_model
from engine.model.source import DTYPE_OF
from engine.model.split import parts_of
from engine.node.head import HeadSetup
from engine.opening import head_for, name_of, stage_for, storing, tape_at
from engine.peer_opening import check_peer
from engine.prompts import Prompts
from engine.protocol import Progress, Prompt, SessionId, SessionView, SyntheticHistory
from engine.reads import Reads
from engine.recovery import Recovery
from engine.request import Limits, Request
from engine.sampling import Sampling
from engine.session import Phase, Session
from engine.sessions import Sessions
from engine.stage import Stage
from engine.stage_calls import Asked
from engine.synthetic import begun_with
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from engine.totals import Statistics, totals
from engine.warm_up import warm_up
from memory.errors import DoesNotFit
from memory.session import SessionMemory
from streams import Backend

__all__ = ["Engine", "Statistics"]

_DEFAULT = Sampling()


class Engine:
    """An open engine. Made by `Engine.open`."""

    def __init__(
        self,
        config: EngineConfig,
        stage: Stage,
        *,
        name: str,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        context_max: int,
        sampling: Sampling = _DEFAULT,
    ) -> None:
        self.config = config
        self.model_name = name
        self.context_max = context_max
        self._stage = stage
        self.tokenizer = tokenizer
        self.template = template
        self.default_sampling = sampling
        self._loop = StepLoop(stage, config, storing(config, name))
        self.departures = self._loop.departures  # how idle sessions leave for the disk, once somebody says where to
        self._held = Sessions(self._loop, config.sessions_max)
        self._sessions = self._held.by_id
        self.instruments = Instruments(self._loop, self._sessions)  # for those who watch
        self._prompts = Prompts(tokenizer, template, stage.model.config.vocabulary)
        self.grammars = Grammars(tokenizer, stage.model.config.vocabulary, stage.model.config.eos_token_ids)
        identify = functools.partial(
            identity_of, stage, model=name, tokenizer=tokenizer.hash(), template=template.hash(), context_max=context_max
        )
        self._archives = Archives(stage, self._sessions, config.sessions_max, identify, self._loop.wake, self._reclaim)
        self.recovery = Recovery(self._loop, self._sessions, self._archives)
        self._ready = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls, model: str | Path, config: EngineConfig | None = None, *, progress: Progress | None = None, backend: Backend | None = None,
        weights: Model | None = None, cluster: HeadSetup | None = None,
    ) -> AsyncIterator["Engine"]:  # fmt: skip
        """Load a model directory, or a named configuration with random weights, and run its step loop for the length of the block.

        Args: progress: called from a worker thread with (tensors read, tensors in all). backend: streams to use; default: the device's.
            weights: those of `model`, loaded before with the same settings; they stay the caller's. cluster: nodes that have the first
            layers of the model; this process has the last ones.
        Raises: BadModel, BadSetting, NotAdmitted: one line each. DeviceFailed, which also cancels the block: the process has to end.
        """
        if not __debug__:
            raise BadSetting("python -O removes the checks that protect the rows; run without it")
        config = config or EngineConfig()
        device = device_of(config)
        peer, directory = check_peer(device, config), Path(model)
        load = functools.partial(
            load_model, directory, layers=None if cluster is None else cluster.stages[-1], load_format=config.load_format,
            dtype=DTYPE_OF[config.dtype], device=device, latent_norm_eps=config.latent_norm_eps, progress=progress,
        )  # fmt: skip
        held, peers = await asyncio.to_thread(parts_of, load, weights, peer)
        tape = None if backend is not None or not config.tape else tape_at(config.tape)
        streams = backend or streams_of(device, None if tape is None else tape.recorder, peer=peer)
        context_max = min(config.context_max or held.config.context_max, held.config.context_max)
        head = None if cluster is None else await head_for(cluster, directory, held, streams)
        stage = await stage_for(held, config, streams, context_max, peers, head)
        engine = cls(
            config, stage, name=name_of(directory), tokenizer=Tokenizer.load(directory),
            template=ChatTemplate.load(directory), context_max=context_max, sampling=default_sampling(directory),
        )  # fmt: skip
        try:
            async with nullcontext() if head is None else engine.recovery.met(head), engine.running():
                if backend is None and device.type != "cpu":
                    await warm_up(engine, stage, sessions=config.decode_batch_limit, context_max=context_max)
                    await engine._archives.known()
                    engine._loop.stored.close()  # nobody will ask for what warmed it
                    engine._loop.depth.restart()
                    engine._loop.reads = Reads()
                    engine._loop.tally.restart()
                with old_objects_left_out(device):
                    yield engine
        finally:
            engine.instruments.close()
            if streams.lost.done():
                leave(engine, held, peers, streams)
            elif backend is None:
                await streams.close()
            if tape is not None:
                tape.close()
            await engine.tokenizer.aclose()
            await engine.grammars.close()
        if backend is not None:
            await stage.idle()  # closed sessions hold their memory until their last operation is done
        check_device(streams.lost, engine, held, peers, streams)
        close_stages(stage)

    @property
    def running(self) -> Callable[[], AbstractAsyncContextManager[None]]:
        """`async with engine.running()`: its step loop runs for the length of the block. `open` does that."""
        return self._running

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Run the step loop for the length of the block; what still runs at its end is aborted, and every session closed."""
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._loop.run(), name="step loop")
                group.create_task(self.departures.run(), name="departures")
                self._ready = True
                try:
                    yield
                # Kept aside so that the caller's own error leaves as it was, not inside an exception group.
                except BaseException as error:
                    failure = error
                await self._shut()
        except BaseExceptionGroup as group_failure:
            raise group_failure.exceptions[0] from None  # the loop's own: the other task raises nothing
        if failure is not None:
            raise failure

    @property
    def stage(self) -> Stage:
        """What the steps touch: for those who measure."""
        return self._stage

    @property
    def ready(self) -> bool:
        """Whether new requests are admitted."""
        return self._ready and not self._loop.away

    @property
    def sessions(self) -> Mapping[SessionId, SessionView]:
        """The sessions that callers hold, as they are now, in order of their making."""
        return self._held.views()

    @property
    def memories(self) -> Mapping[SessionId, SessionMemory]:
        """What the sessions that callers hold have of the stage's memory, those that never had a turn left out: for those who measure."""
        return {session.id: session.memory for session in self._sessions.values() if session.memory is not None}

    async def create_session(self, namespace: str = "") -> SessionId:
        """A new, empty session that outlives its requests. Raises NotAdmitted at `sessions_max`, if nobody may leave."""
        return (await self._with_room(lambda: self._held.create(namespace))).id

    async def fork_session(self, session_id: SessionId, tokens: int | None = None, *, revision: int | None = None) -> SessionId:
        """A new session with the first `tokens` tokens of another one, by default all; rows are shared, and the other may be running.

        Raises: UnknownSession, StaleRevision, BadRequest: more tokens than there are, or it broke; NotAdmitted, NodeLost.
        """
        return (await self._with_room(lambda: self._held.fork(session_id, tokens, revision), session_id)).id

    async def truncate_session(self, session_id: SessionId, tokens: int, *, revision: int | None = None) -> None:
        """Keep the first `tokens` tokens of a session between two turns; its revision moves if that cuts anything off.

        Raises: UnknownSession, StaleRevision, SessionBusy, NotAdmitted, NodeLost; BadRequest: more tokens than there are, or it broke.
        Nothing changed then.
        """
        session = self._held.find(session_id)
        with self._expected(session):
            await self._archives.left(session)
            while True:
                try:
                    await self._held.truncate(session_id, tokens, revision)
                    return
                except NotAdmitted as error:
                    if not await self._made_room(error, session):
                        raise

    async def close_session(self, session_id: SessionId) -> None:
        """Forget a session and release its memory; a running request of it is aborted first. Raises UnknownSession."""
        session = self._held.find(session_id)
        del self._sessions[session_id]
        session.closing = True
        while running := self._held.running(session):
            for request in running:
                self._loop.abort(request)
            await running[0].ended.wait()
        await self._archives.left(session)
        self._loop.drop_memory(session)
        if session.phase is not Phase.CLOSED:
            session.move(Phase.CLOSED)

    async def export_session(self, session_id: SessionId, directory: str | Path, progress: TransferProgress | None = None) -> Exported:
        """Write a session that is between two turns to a directory of its own, or to the one it was written to before: then what is new.
        Where the device failed what RAM has of it is written, also behind the end of `open`'s block.

        Args: progress: called on the loop with (bytes done, bytes in all). Cancel: the archive is what it was.
        Raises: UnknownSession, SessionBusy, NodeLost; SessionBroken: its barrier failed; ArchiveFailed: the disk, and the session lives on;
        BadRequest, ArchiveRefused, NotAdmitted: the directory has no name, or is somebody else's; BadRequest also: it broke before.
        """
        session, place = self._held.find(session_id), place_of(directory)
        await self._held.between_turns(session)
        with self.departures.moving():
            return await self._archives.export(session, place, progress)

    async def import_session(
        self, directory: str | Path, progress: TransferProgress | None = None, *, namespace: str = ""
    ) -> SessionId:  # fmt: skip
        """Make an exported session one of this engine's, under its old id where that is free.

        Args: progress: as `export_session`'s. namespace: whose it is from now on.
        Raises: BadRequest: the directory has no name; ArchiveRefused: damaged, or of another model or format; NotAdmitted: it does not
        fit; ArchiveFailed. Nothing of it is held then, nor after a cancellation.
        """
        place = place_of(directory)
        while True:
            self._loop.check_open()
            try:
                with self.departures.moving():
                    taken = self._held.find(await self._archives.take(place, namespace, progress))
                break
            except NotAdmitted as error:
                full = isinstance(error.__cause__, DoesNotFit) or len(self._sessions) >= self.config.sessions_max
                if isinstance(error, NeverFits) or not full or not await self._made_room(error):
                    raise
        taken.used()
        self._loop.stored.note(taken)
        return taken.id

    def generate(
        self, prompt: Prompt, sampling: Sampling = _DEFAULT, *, session: SessionId | None = None, request_id: str | None = None,
        template_arguments: Mapping[str, Any] | None = None, history: SyntheticHistory | None = None, revision: int | None = None,
        namespace: str = "", after: Sequence[int] = (),
    ) -> Generation:  # fmt: skip
        """One generation from a text, token ids, or chat messages, in a session of its own or continuing `session`.

        Args: history: made-up rows that a session without tokens begins with, for measuring. revision: what the session's must be.
            namespace: a session of its own begins with stored rows of this one's sessions only; another's sessions are unknown.
            after: token ids that a session of its own begins with; the prompt goes on from them as the next turn of a session does.
        Never waits. Raises at the first await of the generation: BadRequest, UnknownSession, StaleRevision, NotAdmitted; later:
        SessionBroken.
        """
        identity = request_id or secrets.token_hex(8)

        async def start() -> Request:
            self._loop.check_open()
            held = self._held.fresh(namespace) if session is None else self._held.find(session, namespace)
            beginning = begun_with(
                history, held, continues=self._continues(held), context_max=self.context_max, vocabulary=self._stage.model.config.vocabulary
            )
            with self._expected(held), beginning:  # until it is queued
                return await self._start(prompt, sampling, held, identity, template_arguments or {}, history, revision, after)

        return Generation(start, self._loop.abort)

    def statistics(self) -> Statistics:
        """A frozen snapshot; costs a pass over the sessions."""
        return totals(self._loop, self._sessions.values())

    async def drain(self, timeout_s: float) -> None:
        """Admit nothing more; wait for running requests at most `timeout_s` seconds, then abort them."""
        self._ready = False
        self._loop.close()
        try:
            await asyncio.wait_for(self._loop.wait_idle(), timeout_s)
        except TimeoutError:
            self._abort_all()
            await self._loop.wait_idle()
        await self.departures.settle()

    @contextmanager
    def _expected(self, session: Session) -> Iterator[None]:
        """For the length of the block the session does not leave, although it looks idle."""
        session.coming += 1
        try:
            yield
        finally:
            session.coming -= 1
            self._loop.wake()

    async def _with_room(self, make: Callable[[], Session], spared: SessionId | None = None) -> Session:
        """What `make` gives, with what idle sessions that leave give back for it. Raises what `make` raises."""
        while True:
            try:
                return make()
            except Asked as asked:
                await asked.event.wait_done()
            except NotAdmitted as error:
                if not await self._made_room(error, None if spared is None else self._sessions.get(spared)):
                    raise

    async def _made_room(self, refused: NotAdmitted, *spared: Session | None) -> bool:
        return await self._loop.pressure.eased(refused.__cause__) or await self.departures.make_room(*spared)

    def _reclaim(self, missing: DoesNotFit) -> bool:
        device = missing.device_missing_bytes
        return not self._loop.pressure.can_ease(device) and self._loop.stored.reclaim(None, device=device > 0) is not None

    def _abort_all(self) -> None:
        for request in self._loop.requests:
            self._loop.abort(request)

    async def _shut(self) -> None:
        """Abort what runs, wait for it, close every session."""
        self._ready = False
        self._loop.close()
        self._abort_all()
        await self._loop.wait_idle()
        self.departures.close()
        check_device(self._stage.backend.lost)  # behind a drain the loop has ended and says nothing of it
        await self._archives.close()
        self._loop.stored.close()
        for session_id in list(self._sessions):
            await self.close_session(session_id)

    async def _start(
        self, prompt: Prompt, sampling: Sampling, session: Session, request_id: str, template_arguments: Mapping[str, Any],
        history: SyntheticHistory | None, revision: int | None, after: Sequence[int],
    ) -> Request:  # fmt: skip
        """Check, tokenise and queue one request."""
        if revision is not None:
            await self._held.settle(session)
        self._held.check(session, revision)
        self._prompts.check_bias(sampling.logit_bias)
        grammar = None if sampling.form is None else await self.grammars.compiled(sampling.form)
        if after and not (session.temporary and history is None):
            raise BadRequest("token ids to go on from begin a session of their own; leave session and history out", field="session")
        continues = bool(after) or self._continues(session)
        before = await self._prompts.tokens(after, {}, continues=False) if after else None
        tokens = await self._prompts.tokens(prompt, template_arguments, continues=continues, held=before or session.tokens)
        tokens = before + tokens if before else tokens
        if not after and self._continues(session) != continues:  # another request came or went while a long text was tokenised
            tokens = await self._prompts.tokens(prompt, template_arguments, continues=not continues, held=session.tokens)
        self._held.check(session, revision)
        if not tokens and (history is not None or len(session.tokens) == session.rows):
            raise BadRequest("the prompt has no tokens", field="prompt")
        request = Request(
            request_id, session, tokens, sampling, limits=Limits(self.context_max, self.config.default_max_tokens),
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed, eos=self._stage.model.config.eos_token_ids,
            tokenizer=self.tokenizer if self.tokenizer.available else None,
        )  # fmt: skip
        request.history = history
        if sampling.form is not None and grammar is not None:
            request.form = self.grammars.follower(grammar, sampling.form, request.ends, request.prompt)
        self._loop.enqueue(request)
        session.used()
        return request

    def _continues(self, session: Session) -> bool:
        """Whether the session has tokens, or will have when the requests before this one have run."""
        return bool(session.tokens) or any(request.session is session for request in self._loop.requests)

"""The reducer put together: core, transport and telemetry."""

from __future__ import annotations

import grpc
from prometheus_client import CollectorRegistry

from andon.host.telemetry import ExchangeDurations, RefusalCounter
from andon_reducer.config import ReducerConfig
from andon_reducer.core.rounds import Rounds
from andon_reducer.telemetry import Telemetry
from andon_reducer.transport.arenas import Arenas
from andon_reducer.transport.reduce import Exchanger
from andon_reducer.transport.relay import Relay
from andon_reducer.transport.service import SERVICE_NAME, ReducerService
from andon_reducer.transport.sessions import Sessions
from andon_reducer.transport.state import StateExchanger

__all__ = ["SERVICE_NAME", "ReducerApp", "build_reducer"]


class ReducerApp:
    """One reducer of one process; lives on the event loop on which it was built."""

    def __init__(self, exchanger: Exchanger, states: StateExchanger, service: ReducerService):
        """Built by `build_reducer`."""
        self._exchanger = exchanger
        self._states = states
        self._service = service

    @property
    def inflight_bytes(self) -> int:
        """Bytes of contributions and averages held now."""
        return self._exchanger.inflight_bytes

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serves `andon.v1.Reducer` on a server that is not started yet."""
        self._service.add_to(server)

    async def close(self) -> None:
        """Ends all calls as UNAVAILABLE and the threads; call it before the server's `stop`."""
        self._states.close()
        await self._exchanger.close()


def build_reducer(
    config: ReducerConfig,
    registry: CollectorRegistry,
    secret: bytes,
    refusals: RefusalCounter | None = None,
    exchanges: ExchangeDurations | None = None,
) -> ReducerApp:
    """A reducer whose session tokens are signed with `secret`; metrics go to `registry`.

    `refusals` and `exchanges` count there, if another service of the process has the same registry.
    """
    telemetry, sessions = Telemetry(registry, refusals, exchanges), Sessions(secret)
    rounds = Rounds(
        window_bytes=config.window_bytes,
        max_payload_bytes=config.max_payload_bytes,
        chunk_elements=config.chunk_elements,
        max_held_bytes=config.max_held_bytes,
    )
    exchanger = Exchanger(
        rounds,
        telemetry,
        sessions=sessions,
        arenas=Arenas(config.shared_dir),
        config=config,
    )
    relay = Relay(config.state_pieces, patience_s=config.state_patience_s)
    states = StateExchanger(relay, telemetry, sessions=sessions, config=config)
    return ReducerApp(exchanger, states, ReducerService(exchanger, states, telemetry))

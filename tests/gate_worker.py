"""An agent-loop worker in small: a Ray actor that takes slots of the shared gate and plays episodes behind it."""

import asyncio
from contextlib import suppress

from environment_coordinator import RayLink
from environment_gate import EnvironmentGate
from environment_session import BrowserSession
from rollout_stats import RolloutReport
from server_choice import ServerChoice
from tests.sessions import OBSERVE, SPEC, START


class GateWorker:
    """One process; all methods run in its one event loop."""

    def __init__(self):
        self.held = []
        self.crowded = []

    async def play(self, chosen, uid, rollouts):
        """Return the rewards of so many rollouts at once; each is reported."""
        return await asyncio.gather(*(self._rollout(chosen, uid, number) for number in range(rollouts)))

    async def _rollout(self, chosen, uid, number):
        with ServerChoice.shared(chosen).for_rollout(uid, number).next() as server:
            async with BrowserSession(server.settings, server.gate) as session:
                await session.seed(START, SPEC)
                await session.act(OBSERVE)
                reward = (await session.verify()).reward
        await server.gate.report(RolloutReport(1, uid, number, reward, ()))
        return reward

    async def take(self, chosen):
        """Take one open slot and keep it; return when it is taken."""
        gate = EnvironmentGate.shared(chosen)
        self.held.append((gate, await gate.take_open_slot()))

    async def free(self):
        """Give back all that `take` took."""
        held, self.held = self.held, []
        for gate, slot in held:
            gate.free_open_slot(slot, closed=False)
            await gate.drain(20.0)

    async def crowd(self, chosen, clients, waiters):
        """Have so many clients of the coordinator wait for so many open slots each; return when all of them ask."""
        gates = [EnvironmentGate(chosen, RayLink(chosen)) for _ in range(clients)]
        self.crowded = [(gate, asyncio.create_task(gate.take_open_slot())) for gate in gates for _ in range(waiters)]
        await asyncio.sleep(0)  # the tasks begin to wait
        await asyncio.gather(*(gate.drain(90.0) for gate in gates))

    async def disperse(self):
        """Cancel all that `crowd` started; return how many of them had got a slot, which is given back."""
        crowded, self.crowded = self.crowded, []
        for _, task in crowded:
            task.cancel()
        passed = 0
        for gate, task in crowded:
            with suppress(asyncio.CancelledError):
                gate.free_open_slot(await task, closed=False)
                passed += 1
        await asyncio.gather(*(gate.drain(90.0) for gate in {gate for gate, _ in crowded}))
        return passed

"""The sampler behind verl's trainer: it counts invalid rollouts and halts a run that has too few valid ones.

Selected with `trainer.v1.sampler.custom_sampler` (configs/browser_base.yaml). It samples as verl's own replay buffers
do and adds three things: a step without a single valid rollout is drawn again and never becomes an empty batch; a step
with too many invalid rollouts is reported at once; and after a number of such steps, or once the environment has been
down for too long, training halts with one error while the last checkpoint is intact.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

import ray
import transfer_queue as tq
from ray.exceptions import RayActorError
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

import patches
from checkpoint_request import CheckpointRequest
from environment_coordinator import coordinator_for_driver
from episode_limits import EpisodeLimits, LimitsError
from recipe_settings import RecipeSettings
from rollout_failures import FailureKind
from rollout_stats import RolloutReport, StepSummary
from row_flags import fetch_flags
from validation_tables import show_episodes

logger = logging.getLogger(__name__)

_WORKER_CHECK_S = 60.0
_WORKER_ANSWER_S = 5.0


class EnvironmentHalt(RuntimeError):
    """Training was halted: the environment gives too few valid rollouts to learn from."""


class WorkerDied(RuntimeError):
    """Training was halted: an agent-loop worker is gone, and with it the rollouts that the trainer waits for."""


class _NothingValid(Exception):
    """The groups that were selected have no valid rollout."""

    def __init__(self, uids: set[str]) -> None:
        super().__init__(f"{len(uids)} groups without a valid rollout")
        self.uids = uids


class _Containment:
    """What both samplers add to verl's; the `sampler_kwargs` of the config are its settings.

    Raises ValueError for an unknown or impossible setting, patches.PatchError if advantages would be computed
    without the recipe's patch.
    """

    def __init__(self, *, sampler_kwargs: Mapping[str, Any], **kwargs: Any) -> None:
        patches.require_applied()
        self.max_invalid_share, self.halt_after_steps, options = _checked(sampler_kwargs)
        self.settings = RecipeSettings.from_env()
        self.bad_steps = 0
        """Steps in a row in which more than max_invalid_share of the rollouts were invalid."""
        self._reports: list[RolloutReport] = []
        self._validation_reports: list[RolloutReport] = []
        self._counted = (0, 0)
        self._checkpoint_request = CheckpointRequest()
        self._look_at_workers_at = time.monotonic() + _WORKER_CHECK_S
        super().__init__(sampler_kwargs=sampler_kwargs, **options, **kwargs)
        # The coordinator lives as long as the process that asked for it first: that is to be the trainer's, here.
        self._coordinator().counters()

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """Return a batch of `batch_size` groups with at least one valid rollout, and the metrics of drawing it.

        Raises EnvironmentHalt when training should not go on.
        """
        drawn: list[RolloutReport] = []
        while True:
            self._reports = []
            try:
                batch, metrics = super().sample(
                    global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
                )
            except _NothingValid as nothing:
                summary = StepSummary.of(self._reports)
                if partition_id == "val":
                    raise EnvironmentHalt(self._halt_text(f"Validation at step {global_steps}", summary)) from None
                self._judge(global_steps, summary)
                logger.error("Step %d is drawn again with other prompts: no rollout was valid", global_steps)
                drawn += self._reports
                self._clear_groups(partition_id, nothing.uids)
                self.refill_fn(batch_size)
                continue
            if partition_id == "val":
                self._validation_reports += self._reports
                show_episodes(self._trainer(), self._validation_reports)
                return self._without_flagged(batch), metrics
            self._judge(global_steps, StepSummary.of(self._reports))
            self._checkpoint_request.look(self._trainer(), global_steps)
            summary = StepSummary.of(drawn + self._reports)
            return batch, metrics | summary.metrics() | self._session_metrics()

    def pop_validation_metrics(self) -> dict[str, float]:
        """Return the metrics of the validation that just ended, and forget them.

        `success_over_valid` is the mean reward of the rollouts that could be measured, `success_over_all` counts the
        others as not solved; `rollouts_valid` and `rollouts` are their denominators.
        """
        summary = StepSummary.of(self._validation_reports)
        self._validation_reports = []
        if not summary.rollouts:
            return {}
        metrics = summary.metrics("browser/val")
        if summary.reward_over_valid is not None:
            metrics["browser/val/success_over_valid"] = metrics.pop("browser/val/reward_over_valid/mean")
            metrics["browser/val/success_over_all"] = metrics.pop("browser/val/reward_over_all/mean")
        return metrics

    def _select_prompt_uids(self, partition_id: str, sampleable_keys: set[str], batch_size: int) -> tuple:
        selected, partition, steps = super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        uids = set(selected)
        reports = self._coordinator().take_reports(uids)
        self._reports += reports
        has_rows = any(key.split("_")[0] in uids for key in partition)
        if reports and (not has_rows or not any(report.valid for report in reports)):
            raise _NothingValid(uids)
        if not reports and not has_rows:
            raise EnvironmentHalt(
                f"None of {len(uids)} groups returned a row, and no rollout reported why: the agent loop itself fails. "
                "Look for 'Error in _run_prompt' above."
            )
        return selected, partition, steps

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        """Wait as verl does. Raises WorkerDied: verl itself would poll for ever for rollouts that nobody runs."""
        now = time.monotonic()
        if now >= self._look_at_workers_at:
            self._look_at_workers_at = now + _WORKER_CHECK_S
            for number, error in dead_workers(getattr(self._trainer(), "agent_loop_manager", None)):
                raise WorkerDied(
                    f"Agent-loop worker {number} is gone, and its rollouts with it: {error}. Training halts, the last "
                    "checkpoint is intact. Look above for what ended it (memory?), then start the same command again."
                )
        return super()._wait_for_next_poll(partition_id, last_debug_time)

    def _trainer(self) -> Any:
        """Return verl's trainer, whose method refills the buffer; None in a test without one."""
        return getattr(self.refill_fn, "__self__", None)

    def _coordinator(self) -> Any:
        return coordinator_for_driver(self.settings)

    def _judge(self, step: int, summary: StepSummary) -> None:
        """Warn about a step with too many invalid rollouts; raise EnvironmentHalt if it is one too many."""
        counters = self._coordinator().counters()
        down = set(summary.invalid_by_kind) == {FailureKind.ENVIRONMENT_DOWN} and not summary.valid
        if down or counters.down_s > self.settings.outage_patience_s:
            raise EnvironmentHalt(self._halt_text(f"The environment is down at step {step}", summary))
        if counters.down_servers:
            servers, count = " and ".join(counters.down_servers), len(self.settings.environment_urls)
            logger.warning("Step %d: of %d environment servers, down are: %s", step, count, servers)
        if summary.invalid_share <= self.max_invalid_share and summary.valid:
            self.bad_steps = 0
            return
        self.bad_steps += 1
        if self.bad_steps >= self.halt_after_steps:
            in_a_row = f"Step {step} is the {self.bad_steps}. in a row above {self.max_invalid_share:.0%}"
            raise EnvironmentHalt(self._halt_text(in_a_row, summary))
        logger.error(
            "Step %d: %s, more than %.0f%%; training halts after %d such steps in a row. Check %s",
            step,
            summary.text(),
            100 * self.max_invalid_share,
            self.halt_after_steps,
            self._checks(summary),
        )

    def _halt_text(self, reason: str, summary: StepSummary) -> str:
        log = self.settings.episode_log_dir or "none, set NEMO_GYM_BROWSER_EPISODE_LOG_DIR"
        return (
            f"{reason}: {summary.text()}. Training halts, the last checkpoint is intact. Check {self._checks(summary)} "
            f"(episode log: {log}), then start the same command again: it resumes from the checkpoint."
        )

    def _checks(self, summary: StepSummary) -> str:
        """Return what to run: the judge's check where it is the judge that fails, the environment's where it is not."""
        of_judge = [kind.startswith("judge_") for kind in summary.invalid_by_kind]
        checks = ["the judge with `python judge.py --check`"] if any(of_judge) else []
        if not of_judge or not all(of_judge):
            urls = self._coordinator().counters().down_servers or self.settings.environment_urls
            commands = [f"`python smoke_environment.py --url {url}`" for url in urls]
            checks.append(f"the environment with {' and '.join(commands)}")
        return " and ".join(checks)

    def _session_metrics(self) -> dict[str, float]:
        counters = self._coordinator().counters()
        opened, closed = self._counted
        self._counted = (counters.opened, counters.closed)
        return {
            "browser/sessions_opened": float(counters.opened - opened),
            "browser/sessions_closed": float(counters.closed - closed),
            "browser/sessions_open": float(counters.open_now),
            "browser/servers_down": float(len(counters.down_servers)),
        }

    def _without_flagged(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Return the validation's rows without those of invalid rollouts, which verl would average in as zeros."""
        if self.settings.drop_invalid:
            return batch
        flagged = fetch_flags(tq, batch)
        if flagged is None or not any(flagged):
            return batch
        tq.kv_clear(
            keys=[key for key, bad in zip(batch.keys, flagged, strict=True) if bad], partition_id=batch.partition_id
        )
        kept = [i for i, bad in enumerate(flagged) if not bad]
        return KVBatchMeta(
            partition_id=batch.partition_id,
            keys=[batch.keys[i] for i in kept],
            tags=[batch.tags[i] for i in kept],
            fields=batch.fields,
            extra_info=batch.extra_info,
        )


def dead_workers(agent_loop_manager: Any) -> list[tuple[int, Exception]]:
    """Return number and error of each agent-loop worker whose process is gone; a slow one is not dead."""
    workers = getattr(agent_loop_manager, "agent_loop_workers", None) or []
    calls = {worker.__ray_ready__.remote(): number for number, worker in enumerate(workers)}
    answered, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_WORKER_ANSWER_S) if calls else ([], [])
    dead = []
    for call in answered:
        try:
            ray.get(call)
        except RayActorError as error:
            dead.append((calls[call], error))
    return dead


class BrowserReplayBuffer(_Containment, ReplayBuffer):
    """The sampler for `trainer.v1.trainer_mode=sync`."""


class BrowserReplayBufferAsync(_Containment, ReplayBufferAsync):
    """The sampler for `trainer.v1.trainer_mode=colocate_async` and `separate_async`."""


def _checked(sampler_kwargs: Mapping[str, Any]) -> tuple[float, int, dict[str, Any]]:
    """Return the share, the number of steps, and what verl's sampler is to be built with besides."""
    section = "trainer.v1.sampler.sampler_kwargs"
    given = dict(sampler_kwargs)
    share, steps = given.pop("max_invalid_share", 0.5), given.pop("halt_after_steps", 3)
    browser = given.pop("browser", None)
    filter_groups, refill = given.pop("filter_groups", None), given.pop("sync_refill_failed_groups", False)
    problems = [f"{section}.{key}: no such key; there are max_invalid_share, halt_after_steps" for key in given]
    try:
        EpisodeLimits.from_section(browser)
    except LimitsError as error:
        problems.append(str(error))
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        problems.append(f"{section}.max_invalid_share={share!r}: must be a number from 0 to 1")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        problems.append(f"{section}.halt_after_steps={steps!r}: must be a whole number of at least 1")
    if filter_groups and filter_groups.get("enable", False):
        # verl's filter demands a metric of every finished group and fails at one whose rollouts were all dropped.
        problems.append("algorithm.filter_groups.enable=true: not supported by this sampler; set it to false")
    if problems:
        raise ValueError("\n".join(problems))
    return float(share), steps, {"sync_refill_failed_groups": True, "gen_batch_size": 1} if refill else {}

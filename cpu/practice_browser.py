"""A browser without a browser: an episode on the practice site, played on the page model.

Tool calls are read by the recipe's own parser, so the simulator accepts and refuses what a real episode would.
"""

from dataclasses import dataclass, field

from browser_prompts import first_user_message
from cpu.practice_pages import Form, Link, Page, observation_text, page_at, submit_path
from cpu.practice_tasks import Task, score
from environment_session import ActionName, BrowserAction
from observations import read_elements
from tool_calls import UnusableCall, read_hermes_calls, to_action


@dataclass
class SimulatedEpisode:
    """An episode under way; `page`, `answer` and `finished` follow the policy's actions."""

    task: Task
    base_url: str
    page: Page = field(init=False)
    typed: dict[int, str] = field(default_factory=dict)
    """Text in the page's fields by element number; leaving the page empties them."""
    answer: str | None = None
    finished: bool = False

    def __post_init__(self) -> None:
        self._open(self.base_url + self.task.initial_url)

    @property
    def first_message(self) -> str:
        """Return the user message that opens the episode."""
        return first_user_message(self.task.question, observation_text(self.page))

    @property
    def reward(self) -> float:
        """Return what the environment would give if it scored the episode now."""
        return score(self.task.scoring_spec(self.base_url), self.page, self.answer)

    def reply(self, text: str) -> str:
        """Return the tool response to a reply of the policy, which may hold anything."""
        calls = read_hermes_calls(text)
        if isinstance(calls, UnusableCall):
            return calls.message
        if len(calls) > 1:
            return "Make exactly one tool call per turn."
        action = to_action(calls[0], read_elements(observation_text(self.page)))
        return action.message if isinstance(action, UnusableCall) else self.act(action)

    def act(self, action: BrowserAction) -> str:
        """Carry an action out and return the observation, or the reason why it had no effect; finish returns ''."""
        if action.name is ActionName.FINISH:
            self.finished, self.answer = True, action.answer or ""
            return ""
        if action.name is ActionName.NAVIGATE:
            if not action.url.startswith(self.base_url + "/"):
                return "navigate failed: only the practice site can be reached"
            self._open(action.url)
        elif action.name is ActionName.CLICK:
            self._click(action.element_id)
        elif action.name is ActionName.TYPE:
            if self.page.elements[action.element_id].kind != "input":
                return "type failed: Element is not an <input>"
            self.typed[action.element_id] = action.text
        return observation_text(self.page)

    def _click(self, number: int) -> None:
        element = self.page.elements[number]
        if isinstance(element.block, Link):
            self._open(self.base_url + element.block.path)
        elif element.kind == "button":
            self._open(self.base_url + submit_path(element.block, self._typed_into(element.block)))

    def _typed_into(self, form: Form) -> str:
        for number, element in enumerate(self.page.elements):
            if element.block is form and element.kind == "input":
                return self.typed.get(number, "")
        return ""

    def _open(self, url: str) -> None:
        self.page = page_at(url)
        self.typed = {}

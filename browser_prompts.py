"""Texts that the policy reads, shared by the dataset, the agent loop and the CPU profile's warm start."""

SYSTEM_PROMPT = (
    "You operate a web browser through the tool `browser`. Each observation shows the page's URL, title, "
    "numbered interactive elements and text. Make exactly one tool call per turn. "
    "When the task is done, call the tool with action finish."
)


def first_user_message(task: str, observation: str) -> str:
    """Return the user message that opens an episode: the task, then the start page as the environment saw it.

    The first observation is part of the prompt rather than a tool response: no tool call precedes it, and a
    chat template has no place for a tool response that answers nothing.
    """
    return f"{task}\n\n{observation}"

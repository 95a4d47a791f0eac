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


def fresh_user_message(task: str, memory: str, observation: str) -> str:
    """Return the user message that opens a fresh context in the middle of an episode: task, memory, page at hand."""
    return f"{task}\n\n{memory}\n\nThe page now:\n{observation}"


SUMMARY_REQUEST = (
    "Your context is full. Before you see the next page, write down what you must remember to finish the task: what is "
    "done, what you found out, what is left to do. Answer with that text alone, without a tool call."
)
"""What the policy reads in place of an observation when it has to summarise."""

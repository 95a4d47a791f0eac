"""The small policy's tokenizer: Qwen3's chat format, with the constant texts and the site's words as single tokens.

The texts that the policy reads and writes are the same as in GPU runs; only their tokenisation is compressed, because
a step of a CPU run costs what its tokens cost: the tool block alone is 1,600 characters long. Any other text is
spelled in bytes, so nothing is out of vocabulary.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import yaml
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from browser_prompts import SYSTEM_PROMPT
from cpu.practice_pages import CODES, ITEMS, NAMES, PLACES
from observations import Element, find_element

TOOL_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "browser_tool.yaml"

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
_CONTROL_TOKENS = (PADDING, "<|im_start|>", END_OF_TURN)
_MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

CALL_OPENING = '\n{"name": "browser", "arguments": {"action": "'
CALL_CLOSING = '"}}\n'
_CALL_PIECES = (CALL_OPENING, CALL_CLOSING, '", "element": "', '", "text": "', '", "answer": "', '", "url": "')
_OBSERVATION_PIECES = ("URL: http://127.0.0.1:", "\nTITLE: ", "\nELEMENTS:", "\nTEXT:\n  ")
MAX_NUMBERED_ELEMENTS = 8

_SITE_WORDS = (
    "list catalogue search shop club home cart results practice site start not found no such page nothing code member "
    "nobody empty back next previous add join name q http Tell the of in Join as Search at and tell Open Buy "
    "observe navigate click type finish input button a system user assistant tool"
).split()

_TOOLS_OPENING = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_CLOSING = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)

# Qwen3's template without its thinking branch: the small policy doesn't think, and leaving the empty <think> block
# out keeps the rendering of a turn independent of the turns after it.
_CHAT_TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- TOOLS_OPENING }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- TOOLS_CLOSING + '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and message.content) or (not loop.first) %}
                {{- '\\n' }}
            {%- endif %}
            {%- if tool_call.function %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {%- if tool_call.arguments is string %}
                {{- tool_call.arguments }}
            {%- else %}
                {{- tool_call.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""".strip()


def chat_template() -> str:
    """Return the Jinja chat template."""
    # A JSON text is a Jinja text literal too.
    return _CHAT_TEMPLATE.replace("TOOLS_OPENING", json.dumps(_TOOLS_OPENING)).replace(
        "TOOLS_CLOSING", json.dumps(_TOOLS_CLOSING)
    )


def tool_schema(config: Path = TOOL_CONFIG) -> dict:
    """Return the policy's tool schema as verl hands it to the chat template.

    verl dumps its pydantic model of the schema, which sorts a property's keys into type, description, enum and leaves
    out what is not set (tools/schemas.py and experimental/agent_loop/tool_agent_loop.py:119 in 0.9.1).
    """
    schema = yaml.safe_load(config.read_text(encoding="utf-8"))["tools"][0]["tool_schema"]
    function = schema["function"]
    parameters = function["parameters"]
    properties = {
        name: {key: value[key] for key in ("type", "description", "enum") if key in value}
        for name, value in parameters["properties"].items()
    }
    return {
        "type": schema["type"],
        "function": {
            "name": function["name"],
            "description": function["description"],
            "parameters": {"type": parameters["type"], "properties": properties, "required": parameters["required"]},
        },
    }


def tools_block(schema: dict) -> str:
    """Return the text that the chat template puts into the system message for this one tool."""
    return f"{_TOOLS_OPENING}\n{json.dumps(schema, ensure_ascii=False)}{_TOOLS_CLOSING}"


def _added_texts(schema: dict) -> list[str]:
    kinds = ("a", "button", "input")
    elements = [f"\n  [{number}] {kind}: " for number in range(MAX_NUMBERED_ELEMENTS) for kind in kinds]
    return [
        *_MARKUP_TOKENS,
        SYSTEM_PROMPT + "\n\n" + tools_block(schema),
        tools_block(schema),
        SYSTEM_PROMPT,
        *_CALL_PIECES,
        *_OBSERVATION_PIECES,
        *elements,
    ]


def _vocabulary_pieces(pre_tokenizer: pre_tokenizers.PreTokenizer, words: Iterable[str]) -> Iterable[str]:
    """Yield the pre-tokenised pieces that become single tokens, in a fixed order, with repetitions."""
    elements = [Element(0, "a", "tea"), Element(1, "input", ""), Element(2, "input", "")]
    texts = [
        *(word for words in (ITEMS, CODES, PLACES, NAMES, _SITE_WORDS) for word in words),
        *"0123456789",
        "\n",
        "a b. c.\n\nd/e?f=g",
        # What the tool answers to a wrong reference; the policy meets these sentences in nearly every episode.
        str(find_element(elements, "x")),
        str(find_element(elements, "input")),
        str(find_element(elements, 9)),
        "Make exactly one tool call per turn.",
        *words,
    ]
    for text in texts:
        for piece, _ in pre_tokenizer.pre_tokenize_str(text):
            yield piece


def build_tokenizer(schema: dict, words: Iterable[str] = (), pieces: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Return the tokenizer, always the same one for the same tool schema.

    `words` become single tokens beside the site's, `pieces` single tokens wherever they stand, punctuation and all.

    A word is one token wherever it stands: spaces are tokens of their own. So copying a label from the page into a
    tool call is copying one token, which a policy of half a million parameters learns within a minute.
    """
    # No token crosses the border of a turn: control tokens are split off first, and the texts below hold none.
    pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[A-Za-z_]+|[0-9]|\n|[^A-Za-z_0-9\n]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    units = [*_CONTROL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *_vocabulary_pieces(pre_tokenizer, words)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(units))}
    # ignore_merges takes a piece that is in the vocabulary whole; all others fall apart into bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    fast.add_tokens([AddedToken(text, normalized=False, special=False) for text in (*_added_texts(schema), *pieces)])
    fast.chat_template = chat_template()
    return fast

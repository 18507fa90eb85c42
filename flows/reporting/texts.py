"""Makes texts that a model, an environment or a person wrote harmless and visible, for pages and for
terminals.

Nothing is taken away in silence. What would act on a terminal, or hide from the eye, is shown by a sign of its own:

- controls, a carriage return too, by their Unicode pictures (U+2400 and on); newline and tab stay as they are;
- what has no picture as its number, such as U+202E in mathematical brackets: the controls from 0x80, all that turns the
  reading direction, zero-width and other format characters, fillers, tags, line and paragraph separators, lone
  surrogates (so the result can always be written as UTF-8) and noncharacters.

Letters and marks of all scripts stay. An emoji keeps its joiners (U+200D, between two emoji) and its variation selector
(U+FE0E or U+FE0F, one, right after a symbol); anywhere else these are shown by number, as a message can be hidden in
them. So are the joiners that some scripts write between letters, the selectors of rare ideographs, and the tags in the
flags of regions: those texts stay readable. More marks than MOST_MARKS on one letter are counted instead of drawn.

To make HTML of the result is the page's own work: a `<` is a visible character and stays.
"""

import re
import unicodedata

MOST_MARKS = 8
"""Marks on one letter that are drawn; no script writes as many."""
MOST_BACK = 64
"""Characters that `cut` gives up at most so as not to divide what is drawn as one."""
ELLIPSIS = "…"

_UNSEEN = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\xad"
    "\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e"  # joiners, marks of direction, fillers, vowels that are not drawn
    "\u200b\u200c\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ud800-\udfff\ufdd0-\ufdef\ufe00-\ufe0d\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff"
    "\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
    + "".join(f"{chr(plane * 0x10000 + 0xFFFE)}{chr(plane * 0x10000 + 0xFFFF)}" for plane in range(1, 17))
    + "]"
)
"""What stands for itself nowhere; U+200D, U+FE0E and U+FE0F do in emoji."""
_EMOJI = "\u2190-\u21ff\u2600-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff"
_SYMBOL = f"#*0-9\xa9\xae\u203c-\u3299{_EMOJI}"
_OUT_OF_PLACE = {
    "\u200d": re.compile(f"\u200d(?:(?<![{_EMOJI}]\u200d)(?<![{_EMOJI}]\ufe0f\u200d)|(?![{_EMOJI}]))"),
    "\ufe0e": re.compile(f"\ufe0e(?<![{_SYMBOL}]\ufe0e)"),
    "\ufe0f": re.compile(f"\ufe0f(?<![{_SYMBOL}]\ufe0f)"),
}
"""What emoji are joined and drawn with, where it is no part of one."""


def visible(text: str) -> str:
    """Return a text in which every character can be seen and none acts; a harmless text comes back as it is.

    `visible(visible(text))` is `visible(text)`. Time is linear in the text, tenths of a second for 10 MB.
    """
    for sign, out_of_place in _OUT_OF_PLACE.items():
        if sign in text:
            text = out_of_place.sub(_shown(sign), text)
    present = "".join(set(text))
    unseen = _UNSEEN.findall(present)
    if unseen:
        # A table of all characters of the text: translating one that the table lacks is many times slower.
        text = text.translate({ord(each): each for each in present} | {ord(each): _shown(each) for each in unseen})
    return text if present.isascii() else _without_stacks(text, present)


def one_line(text: str, most: int) -> str:
    """Return a text visible on one line of at most `most` characters; line ends and tabs are drawn, a cut is marked."""
    head, _ = cut(text, most)
    line = visible(head).replace("\n", "⏎").replace("\t", "⇥")
    if head == text and len(line) <= most:
        return line
    return cut(line, max(most - 1, 0))[0] + ELLIPSIS


def cut(text: str, most: int) -> tuple[str, int]:
    """Return the first `most` characters of a text, or a few less, and how many were left out.

    A letter is kept together with its marks, an emoji with what is joined to it and a surrogate with its other half,
    where these are not absurdly long.
    """
    if len(text) <= most:
        return text, 0
    end = max(most, 0)
    lowest = max(end - MOST_BACK, 0)
    while end > lowest and _belong_together(text[end - 1], text[end]):
        end -= 1
    if end == lowest and (end == 0 or _belong_together(text[end - 1], text[end])):
        end = max(most, 0)
    return text[:end], len(text) - end


def _shown(character: str) -> str:
    """Return the sign of a character that cannot be shown itself."""
    number = ord(character)
    if number < 0x20 or number == 0x7F:
        return chr(0x2400 + number) if number < 0x20 else "\u2421"
    return f"⟨U+{number:04X}⟩"


def _without_stacks(text: str, present: str) -> str:
    """Return a text with the marks counted that are too many on one letter; `present` are its characters."""
    if not any(unicodedata.category(each)[0] == "M" for each in present):
        return text
    # A copy of one sign for marks and one for all else is searched many times faster than a class of 2000 characters.
    kinds = text.translate({ord(each): "M" if unicodedata.category(each)[0] == "M" else "-" for each in set(text)})
    if "M" * (MOST_MARKS + 1) not in kinds:
        return text
    parts, done = [], 0
    for stack in re.finditer("M" * MOST_MARKS + "(M+)", kinds):
        left_out = len(stack[1])
        parts += [text[done : stack.start(1)], f"⟨{left_out} more mark{'s' if left_out > 1 else ''}⟩"]
        done = stack.end()
    return "".join([*parts, text[done:]])


def _belong_together(left: str, right: str) -> bool:
    """Say whether two neighbours are drawn as one: marks, joined and coloured emoji, halves of a surrogate pair."""
    if unicodedata.category(right)[0] == "M" or right == "\u200d" or left == "\u200d":
        return True
    if "\U0001f3fb" <= right <= "\U0001f3ff" or "\U000e0020" <= right <= "\U000e007f":
        return True
    return "\ud800" <= left <= "\udbff" and "\udc00" <= right <= "\udfff"

"""Prompts with objective checks of the replies: a keyword that must be there, and that the text looks like English."""
import re

PROMPTS = [
    ("What is the capital of France?", r"\bParis\b"),
    ("What is 2 plus 2?", r"\b(4|four)\b"),
    ("What color is the sky on a clear day?", r"\b[Bb]lue\b"),
    ("What is the opposite of hot?", r"\b[Cc]old\b"),
    ("Which animal says meow?", r"\b[Cc]ats?\b"),
    ("Write two sentences about dogs.", r"\b[Dd]ogs?\b"),
]

COMMON = set("the a an of to and in is are that it for as with on by this be can from at or was which their you your "
             "they have has not but i me my we our its will who how what one more also".split())


def english_problem(text):
    """None, or why `text` does not look like English: other characters, no common words, or one line over and over."""
    text = text.strip()
    if not text:
        return "the reply is empty"
    if sum(character.isascii() for character in text) < 0.9 * len(text):
        return "mostly characters outside ASCII"
    words = re.findall(r"[A-Za-z']+", text)
    if len(words) < 3:
        return None  # a short answer: the keyword decides
    if sum(word.lower() in COMMON for word in words) < 0.15 * len(words):
        return "hardly any common English word"
    if sum(len(word) > 20 for word in words) > 0.05 * len(words):
        return "words of more than 20 letters"
    if len(words) >= 40 and len({word.lower() for word in words}) < 0.2 * len(words):
        return "the same few words over and over"
    return None


def reply_problem(text, keyword):
    if not re.search(keyword, text):
        return f"nothing in it matches {keyword}"
    return english_problem(text)

"""What facts are called, and the ways to state, change and ask for them."""

from __future__ import annotations

# Key phrase -> kinds of value that suit it.
COMMON: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "code word|codeword|secret word|magic word|safe word|password|passphrase|secret|keyword"
        ).split("|"),
        ("any", "word", "hyphenated"),
    ),
    **dict.fromkeys(
        (
            "secret code|access code|launch code|code|token|marker|needle|key|secret key|"
            "code name|codename|callsign|nickname"
        ).split("|"),
        ("any", "hyphenated", "mixed"),
    ),
    **dict.fromkeys(
        (
            "secret number|magic number|lucky number|number|door number|room number|"
            "door code|pin|PIN|pin code|gate code|seed"
        ).split("|"),
        ("digits",),
    ),
    **dict.fromkeys(
        (
            "port|port number|build number|phone extension|locker number|house number|"
            "seat number|budget|limit|timeout"
        ).split("|"),
        ("digits", "integer"),
    ),
    **dict.fromkeys(
        (
            "order number|ticket number|serial number|reference number|account number|"
            "invoice number|flight number|badge number"
        ).split("|"),
        ("digits", "mixed", "hyphenated"),
    ),
    **dict.fromkeys(
        (
            "API key|api key|session id|request id|commit hash|commit|checksum|license key|"
            "verification code|build id|uuid|id"
        ).split("|"),
        ("hex", "mixed", "technical"),
    ),
    **dict.fromkeys(
        (
            "project name|project|team name|product name|company|ship|planet|ingredient|"
            "topic|title|subject|answer"
        ).split("|"),
        ("word", "phrase", "name", "any"),
    ),
    **dict.fromkeys(
        (
            "file|file name|filename|config file|log file|backup file|entry point|script|"
            "path|working directory"
        ).split("|"),
        ("path",),
    ),
    **dict.fromkeys(
        (
            "branch|branch name|server|server name|host name|hostname|database name|"
            "table name|username|user name|package"
        ).split("|"),
        ("hyphenated", "word", "technical"),
    ),
    **dict.fromkeys("city|destination|meeting place|capital".split("|"), ("city", "word")),
    **dict.fromkeys("color|colour|secret color".split("|"), ("color",)),
    **dict.fromkeys("owner|author|contact|manager|captain|reviewer|winner".split("|"), ("name",)),
    **dict.fromkeys(
        "deadline|date|meeting time|version|url|email|address".split("|"), ("technical",)
    ),
}
PERSONAL: dict[str, tuple[str, ...]] = {
    "name": ("name", "word"),
    "full name": ("name",),
    **dict.fromkeys("favorite color|favourite colour|favorite colour".split("|"), ("color",)),
    **dict.fromkeys(
        "favorite number|lucky number|phone number|locker number|room number|employee id|age".split(
            "|"
        ),
        ("digits",),
    ),
    **dict.fromkeys(
        (
            "dog's name|cat's name|sister's name|brother's name|boss's name|friend's name|"
            "doctor|teacher"
        ).split("|"),
        ("name", "word"),
    ),
    **dict.fromkeys("city|hometown|home town|favorite city".split("|"), ("city", "word")),
    **dict.fromkeys(
        (
            "password|code word|secret|user name|username|project|team|employer|company|"
            "nickname|car"
        ).split("|"),
        ("any", "word", "hyphenated"),
    ),
    **dict.fromkeys("email|email address|birthday|website".split("|"), ("technical",)),
    **dict.fromkeys(
        "favorite animal|favorite food|favorite book|favorite word|hobby|job".split("|"),
        ("word", "phrase"),
    ),
}
FIRST = (
    ["code word"] * 6
    + ["secret number"] * 3
    + ["password"] * 2
    + [
        "secret word",
        "codeword",
        "number",
        "magic word",
        "token",
        "marker",
        "secret code",
        "door number",
    ]
)

STATE = (
    "The {k} is {v}.|The {k} is {v}.|The {k} is {v}|The {k} is {v}. Remember it.|"
    "The {k} is {v}. Please remember it.|"
    "Remember: the {k} is {v}.|Remember this: the {k} is {v}.|Remember that the {k} is {v}.|"
    "Please remember that the {k} is {v}.|Please remember the {k}: {v}.|"
    "Please remember this {k}: {v}|"
    "Remember the {k} {v}.|Note: the {k} is {v}.|Note that the {k} is {v}.|{K}: {v}|"
    "{K} = {v}|The {k}: {v}.|"
    "{v} is the {k}.|I set the {k} to {v}.|Keep in mind that the {k} is {v}.|"
    "Don't forget: the {k} is {v}.|"
    "For later: the {k} is {v}.|Important: the {k} is {v}. Do not forget it.|"
    "By the way, the {k} is {v}.|"
    "The {k} you must remember is {v}.|The {k} for today is {v}.|Here is the {k}: {v}|"
    "Use {v} as the {k}.|"
    "Let the {k} be {v}.|the {k} is {v}|NOTE: {K} is {v}.|FACT: the {k} is {v}.|"
    "We agreed that the {k} is {v}.|"
    "Our {k} is {v}.|This is the {k}: {v}.|I will tell you the {k}. It is {v}.|"
    "The {k} has been set to {v}.|"
    "The {k} is \"{v}\".|The {k} is `{v}`.|The {k} is **{v}**.|The {k} is '{v}'.|"
    '{K}: "{v}"|{K}: `{v}`|- {K}: {v}|* {k}: {v}|'
    "Save this for later. The {k} is {v}.|"
    "You will be asked for the {k} later; it is {v}.|Secret: the {k} is {v}.|"
    "The {k} is {v}, remember that.|The {k} is {v}, please keep it in mind.|"
    "Memorize the {k}: {v}|Memorise this: the {k} is {v}."
).split("|")
STATE_MY = (
    "My {k} is {v}.|My {k} is {v}.|My {k} is {v}|Remember: my {k} is {v}.|"
    "Please remember that my {k} is {v}.|"
    "Note that my {k} is {v}.|Hello, my {k} is {v}.|Hi! My {k} is {v}.|my {k} is {v}|"
    "By the way, my {k} is {v}.|"
    "Just so you know, my {k} is {v}.|Keep in mind that my {k} is {v}.|{v} is my {k}.|"
    "Hi, my {k} is {v}. Nice to meet you.|"
    "My {k} is {v}. Please remember it.|My {k} is {v}, remember that.|"
    "I want you to know that my {k} is {v}."
).split("|")
STATE_NAME = (
    "I am {v}.|I'm {v}.|Call me {v}.|Hi, I'm {v}.|Hello, I am {v}.|You can call me {v}.|"
    "People call me {v}.|This is {v} speaking."
).split("|")
STATE_USER = (
    "The user's {k} is {v}.|User {k}: {v}|The {k} of the user is {v}.|"
    "The person you talk to has this {k}: {v}."
).split("|")
STATE_CONFIG = (
    '{k} = {v}|{k}={v}|{k}: {v}|"{k}": "{v}"|export {k}={v}|{k} is set to {v}.|{k} -> {v}|'
    'Set {k} to {v}.|The value of {k} is {v}.|const {k} = "{v}";'
).split("|")
CHANGE = (
    "The {k} has changed to {v}.|Update: the {k} is now {v}.|"
    "Correction: the {k} is {v}.|The {k} changed: it is now {v}.|"
    "Forget the old {k}; the new {k} is {v}.|The {k} is now {v}.|"
    "Change the {k} to {v}.|From now on the {k} is {v}."
).split("|")

ASK = (
    "What is the {k}?|What is the {k}?|What is the {k}?|What's the {k}?|"
    "What was the {k}?|What was the {k}?|Tell me the {k}.|"
    "Repeat the {k}.|Please repeat the {k}.|What is the {k} I told you?|"
    "What was the {k} that I mentioned?|"
    "Do you remember the {k}?|Can you tell me the {k}?|Which {k} did I give you?|"
    "What {k} did I mention?|"
    "Please tell me the {k} again.|Remind me of the {k}.|Remind me: what is the {k}?|"
    "And the {k}?|Now, what is the {k}?|"
    "I forgot the {k}. What is it?|what is the {k}|what was the {k}?|whats the {k}|"
    "{K}?|Recall the {k}.|Give me the {k}.|"
    "So what was the {k}?|Okay, what is the {k}?|Question: what is the {k}?|"
    "What did I say the {k} was?|"
    "What is the {k} from the text above?|"
    "According to the conversation, what is the {k}?|What is the {k} again?|"
    "State the {k}.|Do you know the {k}?|What {k} was stated earlier?|Which {k} did I tell you?|"
    "At the start I told you the {k}. What is it?|Thanks. What is the {k}?|"
    "Good. Now tell me the {k}.|"
    "What is the {k} mentioned in the system prompt?|What is the {k} in the document?|"
    "Find the {k} in the text.|Print the {k}."
).split("|")
ASK_MY = (
    "What is my {k}?|What is my {k}?|What is my {k}?|What's my {k}?|What was my {k}?|"
    "Tell me my {k}.|Do you remember my {k}?|"
    "Do you know my {k}?|Can you repeat my {k}?|And my {k}?|what is my {k}|"
    "Remind me, what is my {k}?|What did I say my {k} was?|"
    "Can you tell me what my {k} is?|So, what is my {k}?|Please tell me my {k}.|"
    "whats my {k}|What is my {k} again?"
).split("|")
ASK_NAME = "Who am I?|What am I called?|Do you know who I am?".split("|")
ASK_CONFIG = (
    "What is {k}?|What is {k} set to?|What is the value of {k}?|Tell me the value of {k}.|"
    "{k}?|Which value does {k} have?|What was {k}?|What did I set {k} to?"
).split("|")
ONLY = (
    "Reply with only {t}.|Answer with {t} only.|Say only {t}.|"
    "Reply with {t} and nothing else.|Output just {t}.|"
    "What is {t}? Answer with just the value.|What is {t}? Reply with the value only.|"
    "What is {t}? Only say the value.|"
    "What is {t}? Answer in one word.|Just {t}, nothing else.|Give me only {t}.|"
    "Respond with only {t}.|"
    "What is {t}? Answer with only {t}.|What is {t}? Reply with just {t}.|"
    "What was {t}? One word answer.|Print only {t}.|"
    "What is {t}? Answer with {t} only.|"
    "What is {t}? Reply with exactly {t} and nothing else.|Tell me {t}, only the value."
).split("|")

BEFORE = [
    "",
    "",
    "",
    "",
    "Thanks. ",
    "OK. ",
    "Great, thank you! ",
    "One more thing. ",
    "Now a question. ",
    "Hey, ",
]
AFTER = [
    "",
    "",
    "",
    "",
    "",
    " Please answer.",
    " Be brief.",
    " Thanks!",
    " Answer in one sentence.",
    " Please keep it short.",
]
GROUPS = ("service", "team", "server", "project", "room", "system")

"""Tools that clients really send, and the ways to ask for them and for made-up ones."""

from __future__ import annotations

from ops.studies.tiny_model import words

# name variants ; description ; parameters as name variants:kind ; requests (separated by "|").
KNOWN: tuple[tuple[str, str, str, str], ...] = (
    (
        "get_weather weather get_current_weather fetch_weather",
        "Get the current weather for a city.",
        "city/location/place:city",
        (
            "What is the weather in {0}?|How is the weather in {0}?|"
            "What's the weather like in {0}?|Weather in {0}|Is it raining in {0}?|"
            "Tell me the weather in {0}.|I want to know the weather in {0} today."
        ),
    ),
    (
        "read_file read Read view_file open_file cat",
        "Read a file from disk.",
        "path/file_path/filename/file:path",
        (
            "Read {0}|Read the file {0}.|Show me {0}.|What is in {0}?|"
            "Open {0} and tell me what it says.|Please read {0}|Print the contents of {0}|"
            "What does {0} contain?|cat {0}"
        ),
    ),
    (
        "write_file write Write create_file save_file",
        "Write text to a file.",
        "path/file_path/filename:path content/text/contents:phrase",
        (
            "Write {1} to {0}.|Write {1} to the file {0}|"
            "Create the file {0} with the content {1}|Save {1} in {0}.|Put {1} into {0}"
        ),
    ),
    (
        "bash run_command shell execute run_shell exec Bash terminal",
        "Run a shell command and return its output.",
        "command/cmd:command",
        (
            "Run {0}|Run the command {0}|Execute {0}|Please run {0}|Run {0} in the shell.|"
            "Use the shell to run {0}|What does {0} print?"
        ),
    ),
    (
        "search web_search search_web google Search",
        "Search the web.",
        "query/q/search_term:phrase",
        (
            "Search for {0}.|Search the web for {0}|Find information about {0}.|Google {0}|"
            "What can you find about {0}?"
        ),
    ),
    (
        "calculator calculate calc evaluate compute",
        "Evaluate an arithmetic expression.",
        "expression/expr/input:expression",
        (
            "What is {0}?|Calculate {0}|Compute {0}.|How much is {0}?|Evaluate {0}|"
            "Use the calculator for {0}"
        ),
    ),
    (
        "ls list_files list_directory list_dir LS",
        "List the files in a directory.",
        "path/directory/dir:folder",
        (
            "List the files in {0}|What files are in {0}?|ls {0}|Show the directory {0}|"
            "List {0}|Which files does {0} contain?"
        ),
    ),
    (
        "grep search_files find_in_files Grep",
        "Search files for a pattern.",
        "pattern/regex/query:word path/directory/dir:folder",
        "Search for {0} in {1}|Grep {0} in {1}|Find {0} in the files under {1}|Look for {0} in {1}",
    ),
    (
        "glob find_files Glob",
        "Find files whose name matches a pattern.",
        "pattern/glob:glob",
        "Find files that match {0}|Which files match {0}?|Glob {0}|Find all {0} files",
    ),
    (
        "edit_file replace_in_file Edit str_replace",
        "Replace text in a file.",
        "path/file_path:path old/old_string/old_text:word new/new_string/new_text:word",
        (
            "In {0}, replace {1} with {2}.|Replace {1} by {2} in {0}|"
            "Edit {0}: change {1} to {2}|Change {1} to {2} in the file {0}"
        ),
    ),
    (
        "fetch fetch_url web_fetch get_url http_get WebFetch",
        "Fetch a web page.",
        "url/uri/address:url",
        "Fetch {0}|Get {0}|Open the page {0}|Download {0}|What is on {0}?|Read the page at {0}",
    ),
    (
        "send_email email send_mail",
        "Send an email.",
        "to/recipient/address:email subject/title:phrase",
        (
            "Send an email to {0} with the subject {1}|Email {0} about {1}|"
            "Write an email to {0}, subject {1}"
        ),
    ),
    (
        "get_time current_time time_in get_current_time",
        "Get the current time in a place.",
        "city/timezone/location:city",
        (
            "What time is it in {0}?|Tell me the time in {0}.|Current time in {0}?|"
            "What is the time in {0} now?"
        ),
    ),
    (
        "translate translate_text",
        "Translate text to a language.",
        "text/input:phrase language/target/target_language:language",
        "Translate {0} to {1}.|Translate {0} into {1}|How do you say {0} in {1}?",
    ),
    (
        "get_stock_price stock_price quote",
        "Get the price of a stock.",
        "symbol/ticker:symbol",
        "What is the stock price of {0}?|Get the price of {0}|How much is {0} stock?|Quote for {0}",
    ),
    (
        "create_issue open_ticket create_ticket new_issue",
        "Create an issue in the tracker.",
        "title/summary:phrase",
        "Create an issue titled {0}.|Open an issue: {0}|File a ticket called {0}|New issue: {0}",
    ),
    (
        "get_user lookup_user find_user get_customer",
        "Look up a user by name.",
        "name/username/user:name",
        (
            "Look up the user {0}|Find the user {0}|Who is {0}?|Get the user {0}.|"
            "Show me the profile of {0}"
        ),
    ),
    (
        "set_timer start_timer timer",
        "Start a timer.",
        "minutes/duration:integer",
        "Set a timer for {0} minutes.|Start a timer of {0} minutes|Timer for {0} minutes please",
    ),
    (
        "add sum add_numbers",
        "Add two numbers.",
        "a/x/first:integer b/y/second:integer",
        "Add {0} and {1}.|What is the sum of {0} and {1}?|Add {0} to {1}|Sum {0} and {1}",
    ),
    (
        "get_order order_status track_order lookup_order",
        "Get the status of an order.",
        "order_id/id/order:mixed",
        (
            "Where is my order {0}?|What is the status of order {0}?|Track order {0}|"
            "Check the order {0}"
        ),
    ),
    (
        "convert_currency convert exchange",
        "Convert an amount of money.",
        "amount/value:integer to/currency/target:symbol",
        "Convert {0} dollars to {1}|How much is {0} euros in {1}?|Change {0} to {1}",
    ),
    (
        "play_music play_song play",
        "Play a song.",
        "song/title/track:phrase",
        "Play {0}|Play the song {0}|I want to hear {0}|Put on {0}",
    ),
    (
        "git_commit commit",
        "Commit the staged changes.",
        "message/msg:phrase",
        "Commit with the message {0}|Commit the changes: {0}|Make a commit called {0}",
    ),
    (
        "get_secret lookup_secret read_secret",
        "Look up a secret by its name.",
        "name/key/id:hyphenated",
        "What is the secret {0}?|Look up the secret {0}|Get the secret named {0}",
    ),
    (
        "lookup get_value get lookup_value kv_get",
        "Look up the value of a key.",
        "key/name/id:hyphenated",
        "Look up {0}.|What is the value of {0}?|Get the value for {0}|Look up the key {0}",
    ),
    (
        "get_date today current_date",
        "Get today's date.",
        "",
        "What day is it today?|What is the date today?|Which date is it?|Tell me today's date.",
    ),
    (
        "now clock get_now",
        "Get the current time.",
        "",
        "What time is it?|What time is it now?|Tell me the time.|Current time?",
    ),
    (
        "list_users get_users users",
        "List all users.",
        "",
        "List all users|Which users are there?|Show me all users.|Who has an account?",
    ),
    (
        "remember save_note add_note create_note memo",
        "Save a note.",
        "text/note/content:phrase",
        "Save a note: {0}|Note down {0}|Add the note {0}|Make a note that says {0}",
    ),
)
GENERIC = (
    "{V} the {n} {0}.|{V} {n} {0}|Please {v} the {n} {0}.|Can you {v} the {n} {0}?|"
    "I need you to {v} the {n} {0}.|{V} the {n} named {0}.|"
    "Could you {v} {n} {0} for me?|Use {t} on {0}.|Call {t} with {0}.|"
    "{V} this {n}: {0}|Please use the {t} tool for {0}|Call {t} with {p} {0}|"
    "Use the {t} tool with {p} {0}.|Run {t} with {p}={0}|I want to {v} the {n} {0}|{t} {0}"
).split("|")
# Verbs of the known tools would make a request fit two tools.
MADE_UP_VERBS = sorted(
    set(words.VERBS)
    - set(
        (
            "run search find read write list show open get fetch play add calculate "
            "translate edit save lookup execute convert create"
        ).split()
    )
)
MORE = [
    " with {p} {x}",
    ", {p} {x}",
    " and {p} {x}",
    " using {p} {x}",
    ", {p}: {x}",
    ", {p}={x}",
    " ({p} {x})",
]
QUOTES = ["{}"] * 6 + ["'{}'", '"{}"', "`{}`"]
COMMANDS = (
    "ls -la {p}|cat {p}|git status|git log -n {i}|pytest -q {p}|python {p} --{w} {i}|"
    "grep -rn {w} {d}|wc -l {p}|rm {p}|mkdir -p {d}|echo {w}|make {w}|cd {d} && make|"
    "cat {p} | grep {w}|find {d} -name '*.py'|npm run {w}|curl {u}|cargo test {w}|"
    'docker ps|du -sh {d}|head -n {i} {p}|echo "{w} {w}" > {p}|uname -a|pwd|whoami|date|ls'
).split("|")

"""The paper's numbers, tables, figures and claims, the leaderboard and the report: a client of the library.

Nothing in the library imports this package; its commands are registered as an entry point, like the commands of any
other package.
"""

COMMANDS = {
    "Reproduce": {
        "demo": (
            "quasiglobal.reproduction.demo",
            "Show the paper's main result on embedded data, in a few minutes.",
        ),
        "reproduce": ("quasiglobal.reproduction.paper.reproduce", "Make a table or figure of the paper."),
        "leaderboard": (
            "quasiglobal.reproduction.leaderboard.command",
            "Compare all methods, and your own, under one protocol.",
        ),
        "report": (
            "quasiglobal.reproduction.paper.reproduce", "Compare the paper's tables and claims with your runs."
        ),
    },
}
"""Title of the group in `qg --help`, and each command's module and line there."""

"""Natural English prompts of a wanted length, no two alike. Pure.

Every prompt begins with a sentence of its own, so that a server's prefix cache finds nothing to share.
"""

import random

NAMES = (
    "Amara", "Bjorn", "Carmen", "Dmitri", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Keiko", "Lucia", "Mateo",
    "Nadia", "Oskar", "Priya", "Quentin", "Rosa", "Samuel", "Tomoko", "Ursula", "Viktor", "Wanda", "Yusuf",
)  # fmt: skip
TRADES = (
    "baker", "beekeeper", "carpenter", "dentist", "electrician", "ferry pilot", "gardener", "historian", "illustrator",
    "journalist", "librarian", "mechanic", "nurse", "orchard keeper", "physicist", "potter", "schoolteacher", "tailor",
    "translator", "violin maker",
)  # fmt: skip
TOWNS = (
    "Aarhus", "Bergen", "Cork", "Dresden", "Evora", "Freiburg", "Ghent", "Hobart", "Izmir", "Kyoto", "Lyon",
    "Montevideo", "Nagpur", "Oaxaca", "Porto", "Quito", "Riga", "Salamanca", "Tartu", "Valparaiso",
)  # fmt: skip
THINGS = (
    "old harbour crane", "village choir", "community garden", "flood barrier", "tram line", "seed library",
    "night market", "river ferry", "stone bridge", "weather station", "public bath house", "wooden observatory",
    "town archive",
)  # fmt: skip
MONTHS = ("January", "March", "April", "June", "July", "September", "October", "December")

OPENINGS = (
    "{name}, a {trade} from {town}, kept a diary for {number} years about the {thing} near the market square.",
    "In {month}, {name} left {town} with {number} letters that a retired {trade} had written about the {thing}.",
    "The {thing} of {town} was repaired {number} times before {name}, who had trained as a {trade}, took charge of it.",
    "{number} people came to the meeting in {town} where {name} the {trade} explained the future of the {thing}.",
)
MIDDLES = (
    "Nobody knew at first why the work took so long, but the records from {month} give a few useful hints.",
    "A {trade} who lived across the street remembered that the {thing} had once been painted bright yellow.",
    "The council of {town} promised money for new tools, although only {number} coins ever arrived.",
    "When the rain finally stopped, children gathered there and asked {name} to tell the story once more.",
    "Some visitors compared it with the {thing} in {town}, which is larger but not nearly as well kept.",
    "Every week {name} measured the water level, wrote it down, and sent a short report to the newspaper.",
    "The costs were shared between {number} families, and each of them had a say in what should happen next.",
    "It was the custom to celebrate in {month} with soup, bread, and a great deal of singing.",
    "An engineer warned that the foundations were moving slowly, and that the {thing} needed more support.",
    "Years later a student found the plans in a drawer and copied them carefully by hand.",
    "There were quarrels as well, mostly about who should look after the keys during the winter.",
    "The {trade} argued that simple materials last longer when they are cleaned often and used with care.",
)
QUESTIONS = (
    "Explain in a few sentences what happened next and why it mattered to the town.",
    "Write a short summary of this story for a local newspaper.",
    "What should {name} do now, and which risks ought to be considered first?",
    "Describe the most important decision in this account and give reasons for it.",
    "Continue the story in the same style, beginning with the following morning.",
)


def natural_prompt(rng: random.Random, num_words: int) -> str:
    """Return a prompt of `num_words` words: an opening, sentences, and a question where there is room for one."""
    question = _filled(rng, rng.choice(QUESTIONS)).split()
    words = _filled(rng, rng.choice(OPENINGS)).split()
    pending: list[str] = []
    while len(words) + len(question) < num_words:
        if not pending:
            pending = rng.sample(MIDDLES, len(MIDDLES))
        words += _filled(rng, pending.pop()).split()
    return " ".join([*words[: max(num_words - len(question), 0)], *question][:num_words])


def _filled(rng: random.Random, pattern: str) -> str:
    return pattern.format(
        name=rng.choice(NAMES),
        trade=rng.choice(TRADES),
        town=rng.choice(TOWNS),
        thing=rng.choice(THINGS),
        month=rng.choice(MONTHS),
        number=rng.randint(3, 97),
    )

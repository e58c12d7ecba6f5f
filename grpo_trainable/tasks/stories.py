"""The story grammar: prompts and the stories that a policy is pretrained on, from a seed.

Every story has three to five sentences, the last of which closes it. A chosen share of them holds
the keywords of its prompt; the others are drawn in the same way about other nouns, so that length
and form say nothing about whether a keyword is there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from grpo_trainable.tasks.keyword import (
    NOUNS_FILE,
    keyword_prompt,
    read_keywords,
    word_inclusion_reward_fn,
)

MAX_KEYWORDS = 3
SEVERAL_SHARE = 0.08  # of prompts that hold two or three keywords
MIN_SENTENCES = 3
MAX_SENTENCES = 5
MAX_CHARACTERS = 160  # at most 60 tokens of the shipped tokenizer
INTRO_SHARE = 0.3
OMISSION_SHARE = 0.4  # of stories that pass over the second stage of their plot
MAX_OUTLINES = 50  # tried before a keyword gets a sentence of its own
MAX_STORIES = 1000  # tried before it is said that none has the right length
LEFTOVER_ROLE = 10  # `any10`, `any11`: beyond the numbers that the templates use


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# What a noun can do in a story. A noun in none of these is a `thing`.
KINDS = {
    "animal": _words(
        """
        alligator ant ape armadillo badger bat bear beaver bee beetle bird buffalo bull
        bumblebee bunny butterfly calf camel canary cat caterpillar cheetah chick chicken
        chimpanzee chipmunk clam cobra colt cow coyote crab crane cricket crocodile crow cub
        deer dinosaur dog dolphin donkey dove dragon dragonfly duck duckling eagle eel
        elephant falcon fawn ferret finch firefly fish flamingo flea foal fox frog gecko
        gerbil giraffe goat goldfish goose gopher gorilla grasshopper hamster hare hawk
        hedgehog hen hippo hornet horse hummingbird iguana jaguar jellyfish kangaroo kitten
        koala ladybug lamb lemur leopard lion lizard llama lobster magpie mole monkey moose
        mosquito moth mouse mule octopus ostrich otter owl ox oyster panda panther parrot
        peacock pelican penguin pig pigeon piglet pony poodle porcupine puffin puppy rabbit
        raccoon ram rat raven reindeer rhino robin rooster salmon scorpion seagull seahorse
        seal shark sheep shrimp skunk sloth slug snail snake sparrow spider squid squirrel
        starfish stork swallow swan tadpole tiger toad tortoise toucan trout turkey turtle
        unicorn vulture walrus wasp whale wolf woodpecker worm yak zebra
        """
    ),
    "person": _words(
        """
        acrobat actor artist astronaut aunt baby baker barber builder butcher captain
        carpenter chef clown coach cousin cowboy dancer dentist detective doctor driver elf
        explorer fairy farmer firefighter fisherman gardener genie ghost giant grandfather
        grandmother hunter inventor juggler king knight librarian magician mayor mechanic
        mermaid monster musician neighbor nurse painter pilot pirate plumber poet postman
        prince princess queen ranger robot sailor scientist shepherd sheriff singer soldier
        tailor teacher tourist troll uncle waiter weaver witch wizard writer zookeeper
        """
    ),
    "food": _words(
        """
        apple apricot avocado bagel banana bean biscuit blackberry blueberry bun burger
        burrito cabbage cake caramel carrot cauliflower cherry chestnut coconut cookie
        cracker cranberry cucumber cupcake doughnut dumpling egg eggplant fig grape
        grapefruit kiwi lemon lime lollipop mango marshmallow meatball melon muffin mushroom
        noodle olive omelet onion orange pancake papaya pea peach peanut pear pepper pickle
        pie pineapple pizza plum pomegranate popsicle potato pretzel pudding pumpkin radish
        raisin raspberry sandwich sausage scone strawberry taco tangerine tart tomato turnip
        waffle walnut watermelon yam
        """
    ),
    "wear": _words(
        """
        apron backpack belt blouse bonnet boot bow bracelet cap cape cloak coat costume
        crown dress earring glove gown hat helmet hood jacket jersey locket mask mitten
        necklace raincoat ring robe sandal scarf shawl shirt shoe skirt slipper sneaker sock
        sweater tiara tuxedo uniform veil vest wig
        """
    ),
    "place": _words(
        """
        airport alley attic bakery balcony barn basement bay beach bedroom cabin cafe camp
        campsite canyon castle cave cellar circus city classroom cottage desert diner
        factory farm field forest garage garden greenhouse gym hallway harbor hill hospital
        hotel house hut island jungle kitchen library lighthouse market meadow mill museum
        office orchard palace park playground pool porch ranch restaurant school shed stable
        stadium station street studio supermarket swamp temple tent theater town treehouse
        tunnel valley village vineyard yard zoo
        """
    ),
    "sight": _words(
        """
        beehive birdhouse bonfire boulder bridge bush cactus canal carousel chimney cliff
        cloud comet creek dam dock doghouse fence fern fountain gate hive iceberg igloo lake
        log meteor moon mountain nest oak ocean palm planet pond puddle pyramid rainbow
        river road rock sandcastle sapling scarecrow sidewalk skyscraper snowflake snowman
        star statue stream sun sunflower sunrise sunset tower trail tree volcano wall
        waterfall willow windmill
        """
    ),
    "vehicle": _words(
        """
        airplane ambulance balloon bicycle boat bus cab canoe car ferry glider helicopter
        jeep jet kayak motorcycle raft rocket sailboat scooter ship skateboard sled sleigh
        spaceship submarine surfboard taxi tractor train tram tricycle trolley truck tugboat
        unicycle van wagon
        """
    ),
}
KIND_OF = {word: kind for kind, words in KINDS.items() for word in words}
THING = "thing"

# The roles of the templates below: which kinds of noun can play them.
ROLES = {
    "animal": ("animal",),
    "person": ("person",),
    "food": ("food",),
    "wear": ("wear",),
    "place": ("place",),
    "sight": ("sight",),
    "vehicle": ("vehicle",),
    "thing": (THING,),
    "gift": (THING, "wear", "food"),
    "view": ("sight", "vehicle"),
    "any": (*KINDS, THING),
}

GIRLS = _words("Amy Anna Clara Ella Emma Fiona Jane Julia Kate Lena Lucy Maya Mia Nina Sara Zoe")
BOYS = _words("Adam Ben Carl Dan David Felix Hugo Leo Max Noah Omar Paul Peter Sam Theo Tom")
ADJECTIVES = {
    "animal": _words("big small brown gray friendly shy hungry sleepy funny tiny lonely clever"),
    "person": _words("kind old friendly busy cheerful tall grumpy young gentle famous"),
    "food": _words("sweet tasty big warm fresh yummy huge tiny"),
    "wear": _words("new old red blue green yellow pink soft warm pretty"),
    "place": _words("quiet sunny old big lovely dark busy little"),
    "sight": _words("big beautiful tall old strange lovely huge pretty"),
    "vehicle": _words("red blue green yellow old new big little fast noisy"),
    THING: _words("red blue green yellow shiny old new little big pretty funny strange broken"),
}
IN_PLACES = frozenset(
    _words(
        """
    alley attic barn basement bay bedroom cabin cafe castle cave cellar city classroom cottage
    desert diner field forest garage garden greenhouse gym hallway harbor house hut jungle kitchen
    library meadow office orchard palace park school shed stable street studio swamp temple
    tent theater town treehouse tunnel valley village vineyard yard
    """
    )
)
ON_PLACES = frozenset(_words("balcony farm hill island playground porch ranch"))
USES = {
    "food": (
        "took a big bite",
        "ate it all up",
        "shared it with {friend}",
        "saved it for later",
    ),
    "wear": (
        "put it on right away",
        "wore it all day",
        "put it on and danced",
        "ran to show it to {his} mom",
    ),
    THING: (
        "showed it to everyone",
        "kept it close all night",
        "looked at it all day",
        "ran home to show it to {his} dad",
    ),
}
# There is only one of each, and it takes no adjective.
UNIQUE = frozenset({"moon", "ocean", "sun"})
SOUNDS_LIKE_A_CONSONANT = ("unicorn", "unicycle", "uniform", "ukulele")

# Templates. `{role}` is a noun, the same one each time in a document (`{role2}` is another);
# `{a role}` puts an article before it, `{a+ role}` often an adjective as well, `{in place}` the
# preposition that fits, `{use gift}` says what was done with it. `{hero}`, `{friend}` and the
# pronouns `{he}`, `{fhe}` ... are the characters; a capital first letter begins a sentence.
# `[x/y]` is a choice. Lines are alternatives; an empty line begins the next sentence.
# No noun of nouns.txt is written out here: every one comes from a role.
WHEN = """
One day,
One morning,
One sunny day,
One rainy day,
One cold night,
Early one morning,
Last summer,
Late one night,
On a warm afternoon,
One windy day,
"""
INTROS = """
Once there was a {trait} {child} named {hero}.
{hero} was a {trait} {child} who lived near the {place0}.
{hero} was a {trait} {child} who loved [to sing/to dance/to read/to run/to explore/to paint].
There once was a {trait} {animal0} named {hero}.
{hero} the {animal0} was very {trait}.
{hero} lived {in place0} with {his} [mom/dad/family].
"""
TRAITS = _words("little young brave curious quiet cheerful clever kind shy happy")
CLOSINGS = """
{He} [smiled/laughed/sang/danced] all the way home.
It was the best day ever.
{He} went to sleep with a big smile.
{hero} and {friend} were [happy/best friends/so glad].
{He} told everyone about it.
{He} could not wait for the next day.
{hero} never forgot that day.
And that was the end of a [long/good/funny/strange] day.
From then on, {hero} was never [sad/lonely/bored] again.
In the end, everyone was happy.
After that, {hero} and {friend} went home.
"""
PLOTS = """
{when} {who} found {a+ gift} {in place}.
{when} {who} saw something odd {in place}. It was {a+ gift}!
{when} {who} tripped over {a+ gift} {in place}.

{He} asked everyone if they had lost it.
It was [dirty/dusty/wet/cold], so {he} cleaned it.
{He} had never seen one before.
{He} looked around, but nobody was there.

Then {a+ person} said, "That is my {gift}!"
It belonged to {a+ person} who was very [sad/upset/worried].
Then {friend} came running. "You found my {gift}!" {fhe} said.

{He} gave it back and felt [proud/good/happy].
{He} gave it back with a [big/shy/warm] smile.
====
{when} {who} found {a+ gift} next to {a+ view}.
{when} {who} saw {a+ gift} lying {in place}.
{when} {a+ animal} led {hero} to {a+ gift}.

{He} picked it up and {use gift}.
{He} took it home and {use gift}.
"Wow, {a gift}!" {he} said, and {he} {use gift}.

{friend} wanted to see it too.
Then {he} put it [under/behind/next to] {a thing2}.
{His} [mom/dad] said it was better than {a gift2}.
====
{when} {who} could not find {his} {gift}.
{when} {who} lost {his} [best/new/favorite] {gift} {in place}.

{He} looked {in place2}, but it was not there.
{He} looked under {a thing2} and behind {a thing3}.
{He} asked {friend} and {a person} for help.
{He} was so [sad/upset/worried] that {he} began to cry.

At last, {friend} found it [under/behind/next to] {a+ thing4}.
Then {a+ animal} came along with it in its mouth.
It had been [under/behind/beside] {a+ thing4} all along!

{He} [laughed/cheered/jumped for joy].
"I will never lose it again," said {hero}.
{He} thanked {friend} and ran home.
====
{when} {friend} gave {hero} {a+ gift}.
{when} {who} got {a+ gift} from {a+ person}.
{when} {who} got {a+ gift} from {his} [mom/dad/family].

{He} {use gift}.
"I love it!" said {hero}, and {he} {use gift}.
It was just what {he} wanted, and {he} {use gift}.

Later, {he} gave {friend} {a+ gift2}.
Then they went to the {place} together.
{He} said thank you [three/ten/a hundred] times.
====
{when} {who} met {a+ animal} {in place}.
{when} {a+ animal} came up to {hero} {in place}.
{when} {who} saw {a+ animal} beside {a+ view}.

The {animal} was [hungry/very hungry], so {he} gave it {a+ food}.
The {animal} was [cold/wet], so {he} wrapped it in {his} {wear}.
The {animal} was [lost/scared/sad/all alone].
"Can I have {a gift}?" asked the {animal}.

{He} [sang/talked] softly until it felt better.
{He} let it rest next to {a+ thing}.
"Do not worry," said {hero}. "I will help you."

They became [friends/good friends/best friends].
From then on, the {animal} followed {him} everywhere.
The {animal} thanked {him} and ran to the {place2}.
====
{when} {who} heard a [soft/loud/strange] cry. {A+ animal} was stuck [under/behind] {a+ thing}.
{when} {a+ animal} got stuck [under/behind] {a+ view}, and {who} heard it cry.

{He} tried to pull, but it would not move.
{He} ran to get {friend} for help.
{He} used {a+ thing2} to set it free.

{A person} came to help, and soon it was free.
[With one big pull/Very gently/After a long time], {he} got it out.

The {animal} licked {his} face.
That night, the {animal} slept beside {him}.
{He} gave the {animal} {a+ food} and waved goodbye.
====
{when} {who} went to the {place} with {friend}.
{when} {who} took {a+ vehicle} to the {place}.
{when} {hero}'s [mom/dad] took {him} to the {place}.

They saw {a+ view} and {a+ animal}.
They sat near {a+ sight} and ate {a food}.
{He} brought {a+ gift} along.

"Look, {a animal2}!" [shouted/said/whispered] {hero}.
{A+ person} told them about {a+ any}.
There was also {a+ any} to see.

They came home [tired but happy/late/after dark].
{hero} wanted to go again the next day.
====
{Who} wanted to be {a person}.
{Who} [dreamed of being/hoped to become] {a person} one day.

{He} [practiced/trained/worked] every day with {a+ thing}.
{He} put on {a+ wear} and picked up {a+ thing}.
{friend} laughed, but {he} did not give up.

"You are doing very well," said {a+ person2}.
One day, a real {person} came to the {place}.
Then {friend} asked {him} to help with {a+ any}.

{He} felt [proud/brave/strong].
The {person} gave {him} {a+ gift}.
====
{when} {who} wanted {a+ food}.
{when} {who} was so hungry that {he} dreamed of {a+ food}.
{when} {who} made {a+ food} for {friend}.

{He} asked {a person} for one, but there were none left.
{He} looked behind {a thing} and found {a food2}.
It smelled so good that {a+ animal} came to see.

{friend} had one and gave half to {him}.
They ate {in place} and told jokes.
"Yum! This is the best {food} ever," said {friend}.
====
{when} {who} wanted to buy {a+ gift} {in place}.
{when} {a+ person} wanted to sell {hero} {a+ gift}.

{He} had no money, so {he} worked all day.
{He} had only {a gift2}, so {he} asked to trade.
It cost too much, so {friend} paid half.

At last, {he} had it, and {he} {use gift}.
In the end, {he} chose {a+ gift3}.
{He} {use gift}.
====
{when} {who} and {friend} both wanted the {gift}.
{when} {who} did not want to share {his} {gift} with {friend}.

They pulled and shouted.
"It is mine!" said {hero}. "No, mine!" said {friend}.
Neither of them would let go.

Then {a+ person} told them to share.
Then {hero} had an idea. "We can take turns!"
But then {a+ animal} took it and ran off.

They said sorry and hugged.
After that, they went to the {place} together.
====
{when} {a+ person} gave {hero} a magic {thing}.
{when} {who} found a magic {thing} {in place}.

When {he} touched it, {a+ any} appeared.
It could turn {a gift2} into {a any}.
It made {him} as small as {a animal}.

{He} wished for {a+ any2}, and it came true.
"What should I do with it?" {he} asked {friend}.

But soon the magic was gone.
{He} gave the {thing} to {friend}.
{He} kept it secret.
====
{when} {who} dreamed about {a+ any}.
{when} {who} had a dream. There was {a+ any} {in place}.

It could [talk/sing/dance/fly].
It was as big as {a view}.
{A+ animal} was [with it/next to it/afraid of it].

Then {he} woke up and told {friend} about it.
In the morning, {he} drew a picture of it.
When {he} woke up, {he} saw {a any2} instead.
====
{when} {who} drew a picture of {a+ any}.
{when} everyone in class drew something, and {who} chose {a+ any}.

{He} made it [red/blue/green] and [yellow/pink/black].
{friend} said it looked like {a any2}.
{He} put {a any2} next to it.

"It is lovely," said {his} [mom/dad].
{A+ person} wanted to have it.
The picture now hangs {in place}.
====
{Who} was afraid of the {any}.
{when} {who} saw {a+ any} and got scared.

{He} hid behind {a+ view}.
{He} wanted to run away.
{He} held on to {his} {gift}.

"It is only {a any}," said {friend}.
{friend} held {his} hand, and they went closer.
Then {a+ person} told {him} not to worry.

Now {he} is not afraid any more.
{He} felt very [brave/proud] after that.
====
{when} {who} and {friend} looked at {a+ sight}.
{when} {who} walked to {a+ sight} near the {place}.

"It looks like {a any}," said {friend}.
It was so [big/lovely/bright] that {he} could not speak.
{A+ animal} was sleeping beside it.

They sat there until it got dark.
{He} left {a+ gift} there and went home.
Then {a+ vehicle} came by and took them home.
====
{when} {who} saw {a+ vehicle} {in place}.
{when} {friend} came by with {a+ vehicle}.

{A+ person} let {him} sit in front.
It went very [fast/slowly] past {a+ sight}.
It was full of [old/new/broken] things, even {a any}.

Then it hit {a+ thing} and stopped.
Then {a+ animal} jumped in.
They went all the way to the {place2}.
====
{when} {who} played hide and seek with {friend}.
{when} {who} hid {in place} so that {friend} could not find {him}.

{He} stood very still behind {a+ view}.
{friend} looked behind {a thing} and under {a thing2}.
{friend} hid under {a+ thing} and closed {fhis} eyes.

But {a+ animal} gave {him} away.
"I see you!" shouted {friend}.
Then {a+ person} asked to join them.
====
{when} {who} made {a+ gift} out of {a thing2} and {a thing3}.
{when} {who} and {friend} built {a+ vehicle}.

It looked a bit like {a any}.
It took [all day/two days/a whole week].
They worked {in place} until it got dark.

{A+ person} came to see it and clapped.
But {a+ animal} sat on it, and it broke.
{friend} said it was wonderful.
====
{when} {a+ animal} and {a+ animal2} had a race to the {place}.
{when} {hero}'s {animal} ran after {a+ animal2}.

The {animal} ran past {a+ view}.
The {animal} stopped to eat {a food}.
{hero} and {friend} cheered.

The {animal2} won and got {a+ gift}.
The {animal2} jumped over {a+ thing}.
In the end, they rested {in place2}.
====
{when} {who} brought {a+ gift} to class.
{when} {who} showed {friend} {a+ gift}.

Everyone wanted to [touch/see/hold] it.
"It is from {a person}," said {hero}.
{friend} had {a gift2}, and they traded.

Then {a+ animal} came in, and everyone laughed.
"I want one too," said {friend}.
Then {a+ person} told a story about {a any}.
====
{when} {friend} told {hero} a secret. There was {a+ any} {in place}.
{when} {who} heard about {a+ any} {in place}.

They went to look, and it was true.
They went to look, but it was only {a any2}.
"I do not believe it," said {hero}.

{A+ person} was there too.
They took {a+ gift} with them.
{hero} wanted to keep it secret.
====
{Who} had {a animal} that loved {a+ food}.
{Who} had a {trait} {animal} and a {trait} {animal2}.

Every day they went to the {place}.
They slept beside {a+ thing}.
The {animal} liked to wear {a+ wear}.

{when} the {animal} saw {a+ any}.
{when} they met {a+ person}.
"Come with me," {he} said. "We will find {a any}."
"""
LEFTOVERS = """
Then {he} saw {a+ any}.
On the way home, {he} saw {a+ any}.
There was also {a+ any}.
{friend} had {a+ any}.
"""


def _lines(text: str) -> list[str]:
    return [line for line in text.strip().splitlines() if line]


def _stages(text: str) -> list[list[str]]:
    return [_lines(stage) for stage in text.strip().split("\n\n")]


_WHEN, _INTROS, _CLOSINGS, _LEFTOVERS = map(_lines, (WHEN, INTROS, CLOSINGS, LEFTOVERS))
_PLOTS = [_stages(plot) for plot in PLOTS.split("====")]
_SENTENCE_END = re.compile(r"[.!?]\"?(?=\s+[\"A-Z]|\s*$)")
_CHOICE = re.compile(r"\[([^\]]+)\]")
_FIELD = re.compile(r"\{(?:(a|a\+|in|use) )?(\w+)\}", re.IGNORECASE)
_ROLE = re.compile(r"\{(?:(?:a|a\+|in) )?((?:" + "|".join(ROLES) + r")\d*)\}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Document:
    """One line of a corpus: what a policy is given, and what it learns to answer."""

    prompt: str
    response: str


class Storyteller:
    """Writes documents with keywords from `nouns`; every draw comes from `rng`."""

    def __init__(self, nouns: Sequence[str], rng: Random) -> None:
        if len(nouns) < 2 * MAX_KEYWORDS:  # as many again for a story that is not about them
            raise ValueError(f"{len(nouns)} nouns: at least {2 * MAX_KEYWORDS} are needed")
        self._nouns = list(nouns)
        self._rng = rng
        # The scenery is also ours: a list of one's own may lack a kind.
        scenery = dict.fromkeys([*nouns, *read_keywords(NOUNS_FILE)])
        self._by_kind = {
            kind: [noun for noun in scenery if kind_of(noun) == kind] for kind in (*KINDS, THING)
        }

    def keywords(self, several_share: float = SEVERAL_SHARE) -> list[str]:
        """One keyword, or two or three of them with probability `several_share`."""
        count = 1
        if self._rng.random() < several_share:
            count = self._rng.randint(2, MAX_KEYWORDS)
        return self._rng.sample(self._nouns, count)

    def document(self, keyword_share: float, several_share: float = SEVERAL_SHARE) -> Document:
        """A story that includes its keywords with probability `keyword_share`, else none."""
        keywords = self.keywords(several_share)
        include = self._rng.random() < keyword_share
        return Document(keyword_prompt(keywords), self.story(keywords, include=include))

    def story(self, keywords: Sequence[str], *, include: bool) -> str:
        """A story about the keywords, or about as many other nouns.

        Without them the story is drawn in the same way for other nouns, so that nothing but the
        words themselves tells the two kinds apart, least of all the length.

        Raises:
            ValueError: no story with nouns that long is short enough.
        """
        if include:
            return self._tell(keywords, avoid=())
        others = self._rng.sample([n for n in self._nouns if n not in keywords], len(keywords))
        return self._tell(others, avoid=keywords)

    def _tell(self, subjects: Sequence[str], avoid: Sequence[str]) -> str:
        for _ in range(MAX_STORIES):
            template, cast = self._outline(subjects)
            text = _Scene(self._rng, self._by_kind, cast, avoid).tell(template)
            if (
                MIN_SENTENCES <= count_sentences(text) <= MAX_SENTENCES
                and len(text) <= MAX_CHARACTERS
                and not any(word_inclusion_reward_fn(text, word) for word in avoid)
            ):
                return text
        raise ValueError(
            f"no story of at most {MAX_CHARACTERS} characters is about: {', '.join(subjects)}"
        )

    def _outline(self, subjects: Sequence[str]) -> tuple[str, dict[str, str]]:
        """A template whose first noun is the first subject, and the noun of each role so far."""
        sentences, cast = [], {}
        for _ in range(MAX_OUTLINES):
            sentences = [_choose(sentence, self._rng) for sentence in self._plot()]
            roles = list(dict.fromkeys(_ROLE.findall(" ".join(sentences))))
            cast = _cast(roles, subjects)
            if roles and cast.get(roles[0]) == subjects[0]:
                break
        for number, subject in enumerate(s for s in subjects if s not in cast.values()):
            role = f"any{LEFTOVER_ROLE + number}"
            sentences.append(self._rng.choice(_LEFTOVERS).replace("any", role))
            cast[role] = subject
        sentences.append(_choose(self._rng.choice(_CLOSINGS), self._rng))
        return " ".join(sentences), cast

    def _plot(self) -> list[str]:
        """The sentences before the closing one: maybe an introduction, then a plot."""
        stages = list(self._rng.choice(_PLOTS))
        if self._rng.random() < OMISSION_SHARE:
            del stages[1]
        plot = [self._rng.choice(stage) for stage in stages]
        if self._rng.random() < INTRO_SHARE:
            # Who is known is a pronoun from then on.
            plot = [s.replace("{who}", "{he}").replace("{Who}", "{He}") for s in plot]
            plot.insert(0, self._rng.choice(_INTROS))
        return [re.sub("{who}", "{hero}", s, flags=re.IGNORECASE) for s in plot]


class _Scene:
    """One document while it is told: who plays in it, and which noun has which role."""

    def __init__(
        self,
        rng: Random,
        nouns: dict[str, list[str]],
        cast: dict[str, str],
        avoid: Sequence[str],
    ) -> None:
        self._rng = rng
        self._nouns = nouns  # kind -> the nouns to fill up with
        self._cast = dict(cast)  # role -> noun
        self._avoid = {*avoid, *cast.values()}
        girl, friend_girl = rng.random() < 0.5, rng.random() < 0.5
        hero = rng.choice(GIRLS if girl else BOYS)
        friend = rng.choice([n for n in (GIRLS if friend_girl else BOYS) if n != hero])
        he, him, his = ("she", "her", "her") if girl else ("he", "him", "his")
        fhe, fhis = ("she", "her") if friend_girl else ("he", "his")
        self._words = {"hero": hero, "friend": friend, "child": "girl" if girl else "boy"}
        self._words |= {"he": he, "him": him, "his": his, "fhe": fhe, "fhis": fhis}

    def tell(self, template: str) -> str:
        return _FIELD.sub(self._fill, template)

    def _fill(self, field: re.Match[str]) -> str:
        how, name = field.groups()
        text = self._phrase(how.lower() if how else None, name.lower())
        return text[0].upper() + text[1:] if field[0][1].isupper() else text

    def _phrase(self, how: str | None, name: str) -> str:
        if name == "trait":
            return self._rng.choice(TRAITS)
        if name in self._words:
            return self._words[name]
        noun = self._noun(name)
        kind = kind_of(noun)
        if how == "use":
            return self.tell(self._rng.choice(USES[kind]))
        if how == "in":
            preposition = "in" if noun in IN_PLACES else "on" if noun in ON_PLACES else "at"
            return f"{preposition} the {noun}"
        if how is None:
            return noun
        if noun in UNIQUE:
            return f"the {noun}"
        if how == "a+" and self._rng.random() < 0.7:
            noun = f"{self._rng.choice(ADJECTIVES[kind])} {noun}"
        return f"{article(noun)} {noun}"

    def _noun(self, role: str) -> str:
        """The noun in `role`; one that the document does not have yet when the role is new."""
        if role not in self._cast:
            choices = [n for kind in _kinds(role) for n in self._nouns[kind]]
            noun = self._rng.choice(choices)
            while noun in self._avoid:
                noun = self._rng.choice(choices)
            self._cast[role] = noun
            self._avoid.add(noun)
        return self._cast[role]


def count_sentences(text: str) -> int:
    """Ends of sentences; a quotation that goes on with "said" ends none."""
    return len(_SENTENCE_END.findall(text))


def kind_of(noun: str) -> str:
    return KIND_OF.get(noun, THING)


def article(phrase: str) -> str:
    """a or an, by the sound that `phrase` begins with."""
    vowel = phrase[0] in "aeiou" or phrase.startswith("hourglass")
    return "an" if vowel and not phrase.startswith(SOUNDS_LIKE_A_CONSONANT) else "a"


def _cast(roles: Sequence[str], subjects: Sequence[str]) -> dict[str, str]:
    """Role -> noun: each subject gets the first free role that suits it, if there is one."""
    cast: dict[str, str] = {}
    for subject in subjects:
        suits = (r for r in roles if r not in cast and kind_of(subject) in _kinds(r))
        if (role := next(suits, None)) is not None:
            cast[role] = subject
    return cast


def _kinds(role: str) -> tuple[str, ...]:
    return ROLES[role.rstrip("0123456789")]


def _choose(template: str, rng: Random) -> str:
    """`template` with a time for `{when}` and one of every [a/b]."""
    template = re.sub(r"\{when\}", lambda _: rng.choice(_WHEN), template)
    return _CHOICE.sub(lambda match: rng.choice(match[1].split("/")), template)

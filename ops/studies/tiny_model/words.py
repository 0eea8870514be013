"""Word banks and made-up words for the dialogue generator."""

from __future__ import annotations

import random

NOUNS = (
    "anchor apple archive arrow badge barrel basket beacon bell bicycle blanket boat bottle "
    "bridge bucket button cabin candle canvas carpet castle cedar chapel circle cloud coffee "
    "compass copper coral corner cotton crystal curtain desert diamond dragon drawer eagle engine "
    "falcon feather fern field forest fountain fox garden ginger glacier grape hammer harbor "
    "hazel helmet heron hill honey horizon hotel island ivory jacket jasmine jungle kettle "
    "kitchen kite ladder lake lamp lantern laptop lemon letter lighthouse lion lotus magnet maple "
    "marble market meadow melon mirror monkey moon mountain museum needle notebook oak ocean "
    "olive orange orchid otter oyster palace panda paper parrot pebble pencil pepper piano pillow "
    "pine pirate planet pocket pond poppy prairie puzzle pyramid quartz rabbit radio raven ribbon "
    "river robin rocket rose ruby saddle salmon sapphire saturn shadow silver sparrow spider "
    "spoon spring squirrel statue stone storm sugar summit sunset swallow table tangerine teapot "
    "temple thunder tiger timber tomato tower train tulip tunnel turtle umbrella valley vanilla "
    "velvet village violet violin walnut water whale wheel willow window winter wolf wood yellow "
    "zebra"
).split()

OFFICE = (
    "account agent alarm album article asset backup badge batch bill block board booking branch "
    "budget build camera card case catalog channel chapter charge chart client cluster code "
    "comment commit company contact contract coupon course customer dashboard database delivery "
    "deployment device dispute document domain door driver employee entry episode error event "
    "expense export feature feed file filter flag flight folder form game group guest host image "
    "incident index input invoice issue item job journal label layer lead ledger lesson license "
    "link list location lock log machine manual map meeting member memo menu message meter metric "
    "model module monitor node note notice number object offer office option order owner package "
    "page panel parcel part patch patient payment permit phone photo pipeline plan player "
    "playlist plugin podcast policy portal post price printer process product profile project "
    "prompt proposal query queue quote rate receipt recipe record refund region release reminder "
    "report request reservation result review role room route rule sample schedule schema screen "
    "script season secret sensor server service session setting sheet shelf shift shipment signal "
    "site sketch slot snapshot song source sprint stage station stock storage store stream "
    "student subject supplier survey switch system tag target task tax team tenant term test "
    "theme thread ticket timer title token tool topic track trip unit update upload user vault "
    "vendor version video view visit volume voucher wallet warehouse warning watch webhook widget "
    "zone"
).split()

VERBS = (
    "activate add approve archive assign attach audit block book build calculate cancel capture "
    "change charge check clear clone close collect compare compile compress confirm connect "
    "convert copy count create decode delete deliver deploy describe detect disable display "
    "download duplicate edit enable encode encrypt erase estimate evaluate examine execute export "
    "extract fetch fill filter find flush format freeze generate get import index inspect install "
    "launch list load locate lock log lookup mark measure merge migrate monitor mount move mute "
    "notify open order parse patch pause pay ping plan play post prepare preview print process "
    "publish pull purge push query queue rank rate read rebuild record redeem refresh register "
    "release reload remove rename render renew repair replace replay report request reserve reset "
    "resize resolve restart restore resume retrieve return reverse review rotate run save scan "
    "schedule search select send set share show shut sign skip sort split start stop store submit "
    "summarize suspend switch sync tag test trace track train transfer translate trigger trim "
    "tune unlock update upgrade upload validate verify view watch write zip"
).split()

ADJECTIVES = (
    "amber ancient big black blue brave bright broken brown calm clean clever cold crimson "
    "curious daily dark deep dry eager early east empty fancy fast final first flat fresh frozen "
    "gentle giant golden gray green happy heavy hidden hollow hot huge icy inner jolly kind large "
    "last late lazy left light little lonely long loud lucky main mellow mighty misty modern "
    "narrow new noisy north odd old open orange outer pale plain polite proud purple quick quiet "
    "rapid rare red rich right rough round royal rusty secret sharp shiny short shy silent silver "
    "simple slow small smooth soft solid south spare steady still strong sunny sweet swift tall "
    "thin tiny upper urgent velvet warm west wet white wide wild wise yellow young"
).split()

NAMES = (
    "Ada Adam Aisha Alan Alex Alice Amara Amelia Ana Andre Anna Anton Aria Arthur Astrid Ben "
    "Bianca Bob Boris Bruno Carla Carlos Carol Cecilia Chen Chloe Clara Daniel Daria David Diana "
    "Diego Dmitri Edgar Elena Eli Elsa Emil Emma Erik Esther Eva Farid Fatima Felix Fiona Frank "
    "Frida Gabriel George Grace Greta Hana Hannah Harold Hassan Hector Helen Henry Hugo Ida Igor "
    "Ines Ingrid Iris Isaac Ivan Jack Jakob James Jane Jasper John Jonas Jorge Julia Kai Karen "
    "Karl Kenji Klara Lars Laura Lena Leo Liam Lily Linda Linus Louis Lucas Lucy Luna Maria Marco "
    "Martin Mary Maya Mei Mia Milan Mina Mira Mohamed Nadia Naomi Nia Nico Nina Noah Nora Olga "
    "Oliver Omar Oscar Otto Paul Paula Pedro Peter Petra Priya Rafael Rania Raj Rita Robert Rosa "
    "Ruth Sam Samira Sara Simon Sofia Stefan Stella Sven Tariq Tess Theo Thomas Tina Tom Uma Vera "
    "Victor Viola Walter Wei Yara Yuki Yusuf Zara Zoe"
).split()

SURNAMES = (
    "Adams Baker Becker Brown Carter Chen Clark Costa Cruz Davis Diaz Evans Fischer Garcia Gray "
    "Green Hall Hansen Harris Hill Ito Jones Kaya Keller Khan Kim King Klein Kowalski Kumar "
    "Larsen Lee Lopez Lopes Martin Meyer Mills Moore Moreau Murphy Nakamura Nguyen Novak Okafor "
    "Olsen Ortiz Park Patel Perez Petrov Reed Rivera Romano Rossi Sato Schmidt Silva Singh Smith "
    "Stone Suzuki Tanaka Taylor Torres Turner Vega Wagner Walker Wang Weber White Wilson Wong "
    "Wright Yamada Young Zhang"
).split()

CITIES = (
    "Amsterdam|Athens|Austin|Bangkok|Barcelona|Beijing|Berlin|Bergen|Bogota|Boston|Brussels|"
    "Budapest|Cairo|Cape Town|Chicago|Copenhagen|Dakar|Delhi|Denver|Dubai|Dublin|Florence|Geneva|"
    "Hamburg|Hanoi|Helsinki|Istanbul|Jakarta|Kyoto|Lagos|Lima|Lisbon|London|Los Angeles|Lyon|"
    "Madrid|Manila|Melbourne|Mexico City|Milan|Montreal|Moscow|Mumbai|Munich|Nairobi|Naples|"
    "New York|Osaka|Oslo|Paris|Porto|Prague|Quito|Reykjavik|Riga|Rome|San Francisco|Santiago|"
    "Sao Paulo|Seattle|Seoul|Shanghai|Singapore|Stockholm|Sydney|Tallinn|Tokyo|Toronto|Vancouver|"
    "Venice|Vienna|Vilnius|Warsaw|Wellington|Zagreb|Zurich|Tokyo|Springfield|Ljubljana|Malmö|"
    "Düsseldorf|Zürich|São Paulo|Kraków|Málaga"
).split("|")

LANGUAGES = (
    "French German Spanish Italian Portuguese Dutch Polish Japanese Korean Arabic Hindi".split()
)

COLORS = (
    "red blue green yellow purple orange black white pink brown gray teal violet indigo".split()
)

ONSETS = (
    "b c d f g h j k l m n p r s t v w z b c d f g h j k l m n p r s t v w z b c d f g h j k l m "
    "n p q r s t v w x z bl br ch cl cr dr fl fr gl gr kr pl pr qu sh sk sl sm sn sp st str th tr "
    "tw vr wh zh zl kn mr"
).split()
VOWELS = "a e i o u a e i o u ai au ea ee ei ia io oa oo ou ui y".split()
CODAS = [
    "",
    "",
    "",
    "",
    *(
        "b d f g k l m n p r s t x z ck ff ld ll lm lt mp nd ng nk nt rd rk rm rn rt sh sk "
        "ss st th tz"
    ).split(),
]


def syllable(rng: random.Random) -> str:
    """One made-up syllable."""
    return rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)


def made_up(rng: random.Random, low: int = 2, high: int = 3) -> str:
    """A pronounceable lower-case word of `low` to `high` syllables."""
    return "".join(syllable(rng) for _ in range(rng.randint(low, high)))


def common(rng: random.Random) -> str:
    """A lower-case English word from the banks."""
    return rng.choice(rng.choice((NOUNS, OFFICE, ADJECTIVES, VERBS)))

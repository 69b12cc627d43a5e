"""Requests whose answers quote, edit or sum up a text that they bring: five texts, four things to do with each."""

NOTICE = """\
The city library on Harbour Street will close for renovation on Monday, 4 March, and reopen on Saturday, 18 May. \
During this time, books can be returned at the town hall, which is open from 8 a.m. to 6 p.m. on weekdays. All loans \
that fall due while the library is closed are extended until 1 June without a fee. Reserved books will be kept at the \
branch in Mill Lane, where members can also use computers and printers. The children's reading hour moves to the \
community centre and takes place every Wednesday at 3 p.m. The renovation costs 2.4 million euros, of which the state \
pays half. The reading room gets new windows, the lift is replaced, and a small cafe opens on the ground floor."""

MINUTES = """\
Present: Anna Keller (chair), Tom Okafor, Lucia Brandt, Samir Haddad. Tom reported that the migration of the billing \
database was finished on 12 April, two days late, because the backup of the old system had to be repeated. Lucia said \
that support tickets about wrong invoices fell from 41 in March to 9 in April. Samir asked for a second test server, \
since the load tests block the nightly builds. The chair agreed to a budget of 3,000 dollars for it. It was decided \
that the old billing service will be switched off on 31 May. Tom will write to all customers who still use the old \
interface. Lucia will prepare a page with frequently asked questions. The next meeting is on 10 May at 10 a.m."""

CODE = """\
class Inventory:
    def __init__(self):
        self.items = {}

    def add_item(self, name, quantity, price):
        if name in self.items:
            self.items[name]["quantity"] += quantity
        else:
            self.items[name] = {"quantity": quantity, "price": price}

    def remove_item(self, name, quantity):
        if name not in self.items:
            raise KeyError(f"no such item: {name}")
        if self.items[name]["quantity"] < quantity:
            raise ValueError(f"not enough of {name}")
        self.items[name]["quantity"] -= quantity

    def total_value(self):
        return sum(item["quantity"] * item["price"] for item in self.items.values())"""

LETTER = """\
Dear Mr. Lindqvist,

thank you for your order of 14 September. Unfortunatly the oak shelf in your order (number 88213) is not in stock at \
the moment. Our supplyer has told us that the next delivery will arive in the second week of October. We can send you \
the two chairs and the lamp right away, and the shelf as soon as it is here, without any extra cost for shiping. If \
you do not want to wait, you can also choose the same shelf in walnut, which we have in stock, or cancel this part of \
the order. Please let us know what you prefer by 25 September. We are sorry for the inconvinience.

Kind regards,
Maria Svensson, customer service"""

ARTICLE = """\
Researchers at the coastal institute have counted seabirds on the island of Storholm for forty years. Their latest \
report shows that the number of puffins has fallen from 12,000 pairs in 1984 to 3,100 pairs in 2023. The main reason \
is the lack of sand eels, the small fish that puffins feed to their young. Warmer water drives the sand eels to the \
north, and fishing takes a large part of what is left. Other birds do better: the number of gannets has doubled since \
2000, because gannets fly further and eat larger fish. The authors of the report ask for a ban on sand eel fishing \
within fifty kilometres of the island. The fishing union says that such a ban would cost two hundred jobs."""

_TASKS = (
    (
        NOTICE,
        "Repeat this notice word for word, so that I can copy it.",
        "Summarise this notice in a few sentences, using its own words.",
        "List every sentence of this notice that contains a date or a time, each on its own line.",
        "Rewrite this notice as a list of bullet points. Keep the wording.",
    ),
    (
        MINUTES,
        "Quote the decisions of these minutes exactly, and then who has to do what.",
        "Write a short summary of these minutes. Stay close to the text.",
        "Repeat these minutes, one sentence on each line.",
        "What do these minutes say about the billing database and the old billing service? Quote the sentences.",
    ),
    (
        CODE,
        "Rewrite this class with a docstring in every method. Show the whole class.",
        "Rename the class to Warehouse and show the whole code again. Change nothing else.",
        "Add a method named item_count to this class, and show the whole class.",
        "Add type hints to this class and show the complete code.",
    ),
    (
        LETTER,
        "Correct the spelling mistakes in this letter and show the whole letter.",
        "Repeat this letter, but address it to Mrs. Novak.",
        "Summarise what the customer can choose, quoting the letter.",
        "Copy the body of this letter without the greeting and the closing.",
    ),
    (
        ARTICLE,
        "Summarise this article in three sentences taken from it.",
        "Quote all sentences of this article that contain a number.",
        "Repeat this article, and then give it a title.",
        "Rewrite this article with each sentence as a numbered point.",
    ),
)

QUOTING = tuple(f"{task}\n\n{text}" for text, *tasks in _TASKS for task in tasks)
"""The 20 prompts."""

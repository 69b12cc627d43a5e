"""Fifty schemas as applications have them: bounded, so that whoever keeps to one comes to an end.

Nested objects, arrays, enums, recursion, patterns, numeric bounds. Each has what a client would ask for.
"""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

DATE = {"type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])$"}
TIME = {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"}
CODE = {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}
COLOUR = {"type": "string", "pattern": "^#[0-9a-f]{6}$"}
BOOLEAN = {"type": "boolean"}


def text(longest: int) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": longest}


def whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float, high: float, step: float = 0.01) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high, "multipleOf": step}


def one_of(*values: object) -> Schema:
    return {"enum": list(values)}


def some(items: Schema, least: int, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def record(properties: Mapping[str, Schema], *optional: str, **more: Any) -> Schema:
    """An object of these properties and no others; all are required but the optional ones."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
        **more,
    }


def optional(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


PERSON = record({"first_name": text(16), "last_name": text(20), "age": whole(0, 120)})
ADDRESS = record({"street": text(30), "city": text(20), "postcode": {"type": "string", "pattern": "^[0-9]{5}$"}})
MONEY = record({"amount": number(0, 9999), "currency": one_of("EUR", "USD", "GBP", "JPY")})
POINT = record({"latitude": number(-90, 90), "longitude": number(-180, 180)})
LINE = record({"article": CODE, "quantity": whole(1, 99), "price": number(0.01, 999)})

# By depth: each level names the next one, and the last one has no children.
TREE = {
    "$ref": "#/$defs/root",
    "$defs": {
        "leaf": record({"label": text(12)}),
        "branch": record({"label": text(12), "children": some({"$ref": "#/$defs/leaf"}, 0, 2)}),
        "root": record({"label": text(12), "children": some({"$ref": "#/$defs/branch"}, 1, 2)}),
    },
}
COMMENTS = {
    "$ref": "#/$defs/comment",
    "$defs": {
        "comment": record(
            {"author": text(12), "text": text(40), "reply": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/comment"}]}}
        )
    },
}
EXPRESSION = {
    "$ref": "#/$defs/expression",
    "$defs": {
        "operand": {"anyOf": [whole(0, 100), {"$ref": "#/$defs/expression"}]},
        "expression": record(
            {"operator": one_of("+", "-", "*"), "left": {"$ref": "#/$defs/operand"}, "right": whole(0, 100)}
        ),
    },
}
FILES = {
    "$ref": "#/$defs/folder",
    "$defs": {
        "file": record({"name": {"type": "string", "pattern": "^[a-z]{1,10}\\.(txt|py|md)$"}, "size": whole(0, 99999)}),
        "folder": record(
            {"name": {"type": "string", "pattern": "^[a-z]{1,10}$"}, "files": some({"$ref": "#/$defs/file"}, 0, 3)}
        ),
    },
}
SHAPE = {
    "anyOf": [
        record({"kind": {"const": "circle"}, "radius": number(0.1, 100, 0.1)}),
        record({"kind": {"const": "rectangle"}, "width": whole(1, 100), "height": whole(1, 100)}),
        record({"kind": {"const": "polygon"}, "points": some(some(whole(-50, 50), 2, 2), 3, 5)}),
    ]
}

REALISTIC: Mapping[str, tuple[str, Schema]] = {
    "person": ("Invent a person.", PERSON),
    "employee": (
        "Invent an employee.",
        record({"id": CODE, "person": PERSON, "home": ADDRESS, "salary": whole(20000, 200000), "remote": BOOLEAN}),
    ),
    "order": (
        "Invent an order of a shop.",
        record({"number": whole(1, 999999), "date": DATE, "lines": some(LINE, 1, 4), "express": BOOLEAN}),
    ),
    "invoice": (
        "Invent an invoice.",
        record({"invoice": CODE, "customer": PERSON, "address": ADDRESS, "total": MONEY, "due": DATE}),
    ),
    "event": (
        "Invent a meeting.",
        record({"title": text(40), "date": DATE, "start": TIME, "end": TIME, "guests": some(text(16), 0, 5)}),
    ),
    "weather": (
        "Report the weather of a day.",
        record(
            {"place": text(20), "temperature": number(-40, 50, 0.1), "sky": one_of("clear", "cloudy", "rain", "snow")}
        ),
    ),
    "sentiment": (
        "Judge this review: 'The soup was cold, but the waiter was kind.'",
        record({"sentiment": one_of("positive", "negative", "mixed"), "confidence": number(0, 1)}),
    ),
    "entities": (
        "Name the entities in: 'Ada Lovelace wrote to Charles Babbage from London.'",
        some(record({"text": text(24), "kind": one_of("person", "place", "organisation", "date")}), 1, 5),
    ),
    "translation": (
        "Translate 'good morning' to French.",
        record({"language": one_of("en", "fr", "de", "es"), "translation": text(40)}),
    ),
    "summary": (
        "Summarise the plot of Cinderella.",
        record({"title": text(24), "points": some(text(80), 1, 3)}),
    ),
    "classification": (
        "Sort this mail: 'You have won a prize, click here.'",
        record({"label": one_of("spam", "work", "private"), "reasons": some(text(50), 0, 2)}),
    ),
    "tool_call": (
        "Call the tool that tells the weather in Paris.",
        record(
            {
                "tool": one_of("get_weather", "get_time", "search"),
                "arguments": record({"query": text(40), "units": one_of("metric", "imperial")}, "units"),
            }
        ),
    ),
    "sql_filter": (
        "Write a filter for customers older than 30.",
        record({"column": one_of("age", "name", "city"), "operator": one_of("<", "=", ">"), "value": whole(0, 150)}),
    ),
    "recipe": (
        "Invent a simple recipe.",
        record(
            {
                "name": text(30),
                "minutes": whole(1, 240),
                "ingredients": some(record({"name": text(20), "grams": whole(1, 2000)}), 1, 5),
                "steps": some(text(60), 1, 4),
            }
        ),
    ),
    "movie": (
        "Describe a movie.",
        record(
            {"title": text(40), "year": whole(1900, 2030), "genres": some(one_of("drama", "comedy", "action"), 1, 3)}
        ),
    ),
    "book": (
        "Describe a book.",
        record(
            {"title": text(40), "author": text(30), "isbn": {"type": "string", "pattern": "^97[89]-[0-9]{10}$"}},
            "isbn",
        ),
    ),
    "flight": (
        "Invent a flight.",
        record(
            {
                "flight": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3,4}$"},
                "from": {"type": "string", "pattern": "^[A-Z]{3}$"},
                "to": {"type": "string", "pattern": "^[A-Z]{3}$"},
                "departure": TIME,
                "seats": whole(0, 400),
            }
        ),
    ),
    "hotel": (
        "Invent a hotel booking.",
        record(
            {"hotel": text(30), "arrival": DATE, "nights": whole(1, 30), "room": one_of("single", "double", "suite")}
        ),
    ),
    "product": (
        "Invent a product.",
        record(
            {"sku": CODE, "name": text(30), "price": MONEY, "tags": some(text(12), 0, 4), "in_stock": BOOLEAN}, "tags"
        ),
    ),
    "rating": ("Rate this service.", record({"stars": whole(1, 5), "comment": optional(text(60))})),
    "address": ("Invent an address.", ADDRESS),
    "geo_point": ("Where is Berlin?", POINT),
    "route": ("Plan a route.", record({"name": text(20), "points": some(POINT, 2, 3)})),
    "shape": ("Describe a shape.", SHAPE),
    "shapes": ("Describe some shapes.", some(SHAPE, 1, 3)),
    "tree": ("Draw a family tree.", TREE),
    "comments": ("Write a comment to a blog.", COMMENTS),
    "expression": ("Write a sum.", EXPRESSION),
    "files": ("List a folder.", FILES),
    "palette": ("Choose colours for a website.", record({"name": text(16), "colours": some(COLOUR, 2, 5)})),
    "matrix": ("Write a matrix.", some(some(whole(-9, 9), 3, 3), 3, 3)),
    "numbers": ("Write lottery numbers.", some(whole(1, 49), 6, 6)),
    "scores": (
        "Write the results of a match.",
        record({"home": text(16), "away": text(16), "goals": some(whole(0, 9), 2, 2)}),
    ),
    "quiz": (
        "Write a question with four answers.",
        record({"question": text(80), "answers": some(text(30), 4, 4), "right": whole(0, 3)}),
    ),
    "todo": (
        "Write a list of things to do.",
        some(record({"task": text(40), "done": BOOLEAN, "priority": one_of("low", "high")}), 1, 4),
    ),
    "contact": (
        "Invent a contact.",
        record(
            {
                "name": text(24),
                "mail": {"type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,12}\\.(com|org)$"},
                "phone": {"type": "string", "pattern": "^\\+[0-9]{6,12}$"},
            },
            "phone",
        ),
    ),
    "login": (
        "Log a login.",
        record({"user": text(16), "time": TIME, "ip": {"type": "string", "format": "ipv4"}, "ok": BOOLEAN}),
    ),
    "log_line": (
        "Write a line of a log.",
        record({"level": one_of("debug", "info", "warning", "error"), "message": text(60), "code": whole(0, 599)}),
    ),
    "metric": (
        "Write a measurement.",
        record({"name": {"type": "string", "pattern": "^[a-z_]{3,20}$"}, "value": number(0, 1000), "unit": text(8)}),
    ),
    "config": (
        "Write the configuration of a server.",
        record(
            {
                "host": text(20),
                "port": whole(1, 65535),
                "tls": BOOLEAN,
                "limits": record({"connections": whole(1, 10000), "seconds": number(0.1, 60, 0.1)}),
            }
        ),
    ),
    "permissions": (
        "Write what a user may do.",
        record({"user": text(16), "may": record({"read": BOOLEAN, "write": BOOLEAN, "delete": BOOLEAN})}),
    ),
    "version": ("Name a version.", {"type": "string", "pattern": "^[0-9]{1,2}\\.[0-9]{1,2}\\.[0-9]{1,3}$"}),
    "uuid": ("Write a unique id.", record({"id": {"type": "string", "format": "uuid"}})),
    "schedule": (
        "Write opening hours.",
        record({day: optional(record({"opens": TIME, "closes": TIME})) for day in ("monday", "tuesday", "sunday")}),
    ),
    "patient": (
        "Write down a patient's state.",
        record(
            {
                "name": text(24),
                "pulse": whole(30, 220),
                "temperature": number(34, 43, 0.1),
                "allergies": some(one_of("pollen", "nuts", "penicillin"), 0, 3),
            }
        ),
    ),
    "exam": (
        "Write the marks of a student.",
        record(
            {"student": text(24), "marks": {"type": "object", "additionalProperties": whole(1, 6), "maxProperties": 3}}
        ),
    ),
    "payment": (
        "Invent a payment.",
        {
            "anyOf": [
                record(
                    {"method": {"const": "card"}, "number": {"type": "string", "pattern": "^[0-9]{4}$"}, "sum": MONEY}
                ),
                record({"method": {"const": "cash"}, "sum": MONEY}),
            ]
        },
    ),
    "pair": (
        "Write a word and its length.",
        {"type": "array", "prefixItems": [text(12), whole(1, 12)], "items": False, "minItems": 2},
    ),
    "choice": ("Is the sea salty?", one_of("yes", "no", "maybe")),
    "nested": (
        "Write a deep object.",
        record({"a": record({"b": record({"c": record({"d": some(whole(0, 9), 1, 3), "e": text(10)})})})}),
    ),
}

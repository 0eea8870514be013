"""The version of Hearth: the one place that says it. The package's metadata is made from here."""

VERSION = "0.2.0"

"""The version of the tool. It stands in every container, since another version may write other bytes."""

VERSION = "0.1.0"

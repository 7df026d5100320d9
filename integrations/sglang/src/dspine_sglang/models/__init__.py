"""The package that SGLang's model registry searches for `EntryClass`."""

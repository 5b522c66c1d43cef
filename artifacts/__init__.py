"""The on-disk artifact format: schema, writer, reader, trust, certificates."""

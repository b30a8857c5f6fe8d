"""From texts to ids, from ids to rows, from rows to batches."""

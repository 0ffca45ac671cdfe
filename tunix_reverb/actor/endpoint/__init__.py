"""An OpenAI-compatible endpoint: agents outside play, we record and learn."""

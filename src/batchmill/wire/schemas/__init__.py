"""JSON Schemas of replies: how a request asks for one, and how a reply is validated."""

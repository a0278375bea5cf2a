"""OpenAI API: bodies, answers and errors.

    chat_request ──► chat                        /v1/chat/completions
    completions_request ──► together ──► completions    /v1/completions
    responses_api/                               /v1/responses, and stored ones
    embeddings, models, tokens                   one endpoint each

Several endpoints share `fields` of bodies and of answers, `logprobs` and `errors`.
"""

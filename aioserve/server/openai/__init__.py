"""The OpenAI API: its bodies, its answers, its errors.

    chat_request ──► chat                        /v1/chat/completions
    completions_request ──► together ──► completions    /v1/completions
    responses_api/                               /v1/responses, and those that were stored
    embeddings, models, tokens                   one endpoint each

What several endpoints share stands beside them: `fields` of bodies and of answers, `logprobs` and
`errors`.
"""

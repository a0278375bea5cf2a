"""The OpenAI API: its bodies, its answers, its errors.

    chat_api/          /v1/chat/completions
    completions_api/   /v1/completions
    responses_api/     /v1/responses, and those that were stored
    embeddings, models, tokens: one endpoint each

In each folder `request` is what is asked, and `making` answers it. Beside the folders stands what
several endpoints share: `fields` of bodies, `names` and `errors`, and of answers `usage`,
`logprobs`, `token_texts` and `chunks`.
"""

"""Cases that are answered wrongly today, and what is said. Whoever mends one deletes its line."""

KNOWN_WRONG = {
    "two backward passes in the other order": "data of the root",
    "tensor parallel ranks": "parameter of 1.a",
    "tensor parallel ranks that both add the bias": "parameter of 1.a",
    "tensor parallel ranks without a sum of gradients": "parameter of 1.a",
}

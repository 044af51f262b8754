"""RULER's templates (Hsieh et al. 2024, NVIDIA, https://github.com/NVIDIA/RULER, Apache-2.0)."""

NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

# Each template in two parts: what holds the context, and the question with the beginning of the answer.
NEEDLE_CONTEXT = (
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will quiz "
    "you about the {type_needle_v} afterwards.\n{context}"
)
NEEDLE_QUESTION = (
    "\nWhat are all the special magic {type_needle_v} for {query} mentioned in the provided text? The special magic "
    "{type_needle_v} for {query} mentioned in the provided text are"
)
VARIABLES_CONTEXT = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}"
VARIABLES_QUESTION = (
    "\nQuestion: Find all variables that are assigned the value {query} in the text above. Answer: According to the "
    "chain(s) of variable assignment in the text above, {num_v} variables are assigned the value {query}, they are: "
)
COMMON_CONTEXT = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}"
)
COMMON_QUESTION = (
    "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear most often "
    "in the list are:"
)
FREQUENT_CONTEXT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}"
)
FREQUENT_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
    "appeared words are:"
)

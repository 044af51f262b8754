"""RULER's templates (Hsieh et al. 2024, NVIDIA, https://github.com/NVIDIA/RULER, Apache-2.0).

Each task has the part with the context, the question, and the beginning of the answer.
"""

NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

NEEDLE_CONTEXT = (
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will quiz "
    "you about the {type_needle_v} afterwards.\n{context}"
)
NEEDLE_QUESTION = "\nWhat are all the special magic {type_needle_v} for {query} mentioned in the provided text?"
NEEDLE_ANSWER = " The special magic {type_needle_v} for {query} mentioned in the provided text are"
VARIABLES_CONTEXT = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}"
VARIABLES_QUESTION = "\nQuestion: Find all variables that are assigned the value {query} in the text above."
VARIABLES_ANSWER = (
    " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are assigned the "
    "value {query}, they are: "
)
COMMON_CONTEXT = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}"
)
COMMON_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
COMMON_ANSWER = " Answer: The top 10 words that appear most often in the list are:"
FREQUENT_CONTEXT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}"
)
FREQUENT_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text?"
)
FREQUENT_ANSWER = " Answer: According to the coded text above, the three most frequently appeared words are:"
QA_CONTEXT = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}"
)
QA_QUESTION = (
    "\n\nAnswer the question based on the given documents. Only give me the answer and do not output any other "
    "words.\n\nQuestion: {query}"
)
QA_ANSWER = " Answer:"
QA_DOCUMENT = "Document {number}:\n{document}"

//! Excerpts of messages that quote what owners of pods write.

/// Largest number of characters of an excerpt, besides the mark where text is left out.
const MAX_CHARS: usize = 500;

/// Returns a message, or the begin and the end of a long one. Messages say at their begin what they are about and at
/// their end what to write; a value that they quote in between may have the size of a whole object.
#[must_use]
pub fn excerpt(message: String) -> String {
    let count = message.chars().count();
    if count <= MAX_CHARS {
        return message;
    }
    let half = MAX_CHARS / 2;
    let begin = message.chars().take(half);
    begin.chain(['…']).chain(message.chars().skip(count - half)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_messages_keep_their_begin_and_their_end() {
        assert_eq!(excerpt("short".to_owned()), "short");
        let all = "é".repeat(MAX_CHARS);
        assert_eq!(excerpt(all.clone()), all);
        let cut = excerpt(format!("key: found {:?}; remove it", "é".repeat(10_000)));
        assert_eq!(cut.chars().count(), MAX_CHARS + 1);
        assert!(cut.starts_with("key: found ") && cut.ends_with("; remove it"), "{cut}");
    }
}

//! The names of nodes by position, in one block of memory, so that comparing thousands of names
//! reads it sequentially.

/// The names by position.
#[derive(Clone, Debug, Default)]
pub(super) struct Names {
    text: String,
    /// The range of each name in `text`; empty for no name.
    places: Vec<(usize, usize)>,
    /// The bytes of `text` that belong to no name any more.
    waste: usize,
}

/// Bytes that may be wasted before the names are compacted: one page, so that small clusters never
/// compact.
const ALLOWED_WASTE_BYTES: usize = 4096;

impl Names {
    /// Returns whether the name at `index` is `name`.
    pub(super) fn is_at(&self, index: usize, name: &str) -> bool {
        self.at(index).is_some_and(|known| known == name)
    }

    fn at(&self, index: usize) -> Option<&str> {
        let (begin, end) = *self.places.get(index)?;
        self.text.get(begin..end).filter(|name| !name.is_empty())
    }

    /// Sets the name at `index`; an empty name clears it.
    pub(super) fn set(&mut self, index: usize, name: &str) {
        if index >= self.places.len() {
            self.places.resize(index + 1, (0, 0));
        }
        self.waste += self.at(index).map_or(0, str::len);
        let begin = self.text.len();
        self.text.push_str(name);
        self.places[index] = (begin, self.text.len());
        if self.waste > ALLOWED_WASTE_BYTES.max(self.text.len() / 2) {
            self.compact();
        }
    }

    fn compact(&mut self) {
        let mut compacted = Self::default();
        for index in 0..self.places.len() {
            compacted.set(index, self.at(index).unwrap_or_default());
        }
        *self = compacted;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn returns_the_name_that_was_set_last(steps in prop::collection::vec((0..20usize, "[a-z]{0,300}"), 1..400)) {
            let mut names = Names::default();
            let mut expected = vec![String::new(); 20];
            for (index, name) in steps {
                names.set(index, &name);
                expected[index] = name;
                for (index, name) in expected.iter().enumerate() {
                    prop_assert_eq!(names.at(index).unwrap_or_default(), name);
                }
                let used: usize = expected.iter().map(String::len).sum();
                prop_assert!(names.text.len() <= 2 * used + 2 * ALLOWED_WASTE_BYTES);
            }
        }
    }
}

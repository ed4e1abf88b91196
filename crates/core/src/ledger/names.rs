//! The names of nodes by position, in one piece of memory: to compare thousands of them in a row is to read it from front to back.

/// Names by position.
#[derive(Clone, Debug, Default)]
pub(super) struct Names {
    text: String,
    /// Where in `text` each stands; an empty place for none.
    places: Vec<(usize, usize)>,
    /// Bytes of `text` that are no name's any more.
    waste: usize,
}

/// So many bytes may be wasted however small the rest is.
const WASTE: usize = 4096;

impl Names {
    /// Whether this name stands there.
    pub(super) fn is_at(&self, index: usize, name: &str) -> bool {
        self.at(index).is_some_and(|known| known == name)
    }

    fn at(&self, index: usize) -> Option<&str> {
        let (begin, end) = *self.places.get(index)?;
        self.text.get(begin..end).filter(|name| !name.is_empty())
    }

    /// Puts a name there, or nothing.
    pub(super) fn set(&mut self, index: usize, name: &str) {
        if index >= self.places.len() {
            self.places.resize(index + 1, (0, 0));
        }
        self.waste += self.at(index).map_or(0, str::len);
        let begin = self.text.len();
        self.text.push_str(name);
        self.places[index] = (begin, self.text.len());
        if self.waste > WASTE.max(self.text.len() / 2) {
            self.tidy();
        }
    }

    fn tidy(&mut self) {
        let mut tidied = Self::default();
        for index in 0..self.places.len() {
            tidied.set(index, self.at(index).unwrap_or_default());
        }
        *self = tidied;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn holds_what_was_last_put_there(steps in prop::collection::vec((0..20usize, "[a-z]{0,300}"), 1..400)) {
            let mut names = Names::default();
            let mut expected = vec![String::new(); 20];
            for (index, name) in steps {
                names.set(index, &name);
                expected[index] = name;
                for (index, name) in expected.iter().enumerate() {
                    prop_assert_eq!(names.at(index).unwrap_or_default(), name);
                }
                let used: usize = expected.iter().map(String::len).sum();
                prop_assert!(names.text.len() <= 2 * used + 2 * WASTE);
            }
        }
    }
}

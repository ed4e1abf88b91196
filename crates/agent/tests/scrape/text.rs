//! A parser of metrics that is at least as strict as Prometheus. It also rejects duplicate series
//! and families whose samples are not adjacent.

use std::collections::{BTreeMap, BTreeSet};

use tessera_wire::metrics::Format;

/// The samples of a page: name, labels and value.
pub(crate) struct Text(Vec<(String, BTreeMap<String, String>, f64)>);

impl Text {
    pub(crate) fn parse(text: &str, format: Format) -> Self {
        let mut samples = Vec::new();
        let mut seen = BTreeSet::new();
        let mut families = BTreeSet::new();
        let mut family = String::new();
        let ends = text.lines().last() == Some("# EOF");
        assert_eq!(ends, format == Format::OpenMetrics, "the end of the page");
        for line in text.lines().filter(|line| *line != "# EOF") {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                family = rest.split_once(' ').unwrap().0.to_owned();
                assert!(families.insert(family.clone()), "family {family} occurs twice");
                continue;
            }
            if line.starts_with("# ") {
                assert!(line.contains(&format!(" {family} ")), "{line} is not of {family}");
                continue;
            }
            let (name, labels, value) = sample(line);
            assert!(name.starts_with(&family), "{name} is not of {family}");
            let key = format!("{name}{labels:?}");
            assert!(seen.insert(key), "duplicate: {line}");
            samples.push((name, labels, value));
        }
        Self(samples)
    }

    pub(crate) fn samples(&self, name: &str) -> impl Iterator<Item = (&BTreeMap<String, String>, f64)> {
        self.0.iter().filter(move |(found, ..)| found == name).map(|(_, labels, value)| (labels, *value))
    }

    /// Returns the result of `sum by (label) (name)`.
    pub(crate) fn sums(&self, name: &str, label: &str) -> BTreeMap<String, f64> {
        let mut sums = BTreeMap::new();
        for (labels, value) in self.samples(name) {
            *sums.entry(labels[label].clone()).or_insert(0.0) += value;
        }
        sums
    }
}

fn sample(line: &str) -> (String, BTreeMap<String, String>, f64) {
    let Some((name, rest)) = line.split_once('{') else {
        let (name, value) = line.split_once(' ').unwrap();
        return (name.to_owned(), BTreeMap::new(), value.parse().unwrap());
    };
    let mut labels = BTreeMap::new();
    let mut rest = rest;
    loop {
        let (label, behind) = rest.split_once("=\"").unwrap();
        assert!(label.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'), "{label:?} in {line}");
        let mut value = String::new();
        let mut characters = behind.char_indices();
        let end = loop {
            let (place, c) = characters.next().unwrap();
            match c {
                '"' => break place,
                '\\' => value.push(match characters.next().unwrap().1 {
                    'n' => '\n',
                    c @ ('"' | '\\') => c,
                    c => panic!("\\{c} in {line}"),
                }),
                c => value.push(c),
            }
        };
        assert!(labels.insert(label.to_owned(), value).is_none(), "{label} twice in {line}");
        match behind[end + 1..].strip_prefix(',') {
            Some(more) => rest = more,
            None => {
                let value = behind[end + 1..].strip_prefix("} ").unwrap();
                return (name.to_owned(), labels, value.parse().unwrap());
            }
        }
    }
}

//! Metrics as text, in the two forms Prometheus reads: its own of old (0.0.4) and OpenMetrics 1.0.
//!
//! Families come one after the other, each written once with all its samples. What is written is always well-formed: values and
//! labels are escaped, numbers that are none are left out, a family without samples is not mentioned.

use std::fmt::{self, Write as _};

/// How the text is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// `text/plain; version=0.0.4`.
    #[default]
    Plain,
    /// `application/openmetrics-text; version=1.0.0`.
    OpenMetrics,
}

/// What a family is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Goes up and down.
    Gauge,
    /// Only grows; its name ends in `_total` unless it is another project's.
    Counter,
    /// Facts in labels, always 1; its name ends in `_info`.
    Info,
}

/// Labels as they stand between braces, ready to be written many times.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Labels(String);

/// A page of metrics in the making.
#[derive(Debug)]
pub struct Page {
    format: Format,
    text: String,
}

/// One family in the making.
#[derive(Debug)]
pub struct Family<'a> {
    page: &'a mut Page,
    name: &'a str,
    kind: Kind,
    help: &'a str,
    begun: bool,
}

impl Format {
    /// The one a reader prefers, by its `Accept` header: OpenMetrics if it names it with no less weight than plain text.
    #[must_use]
    pub fn accepted(header: &str) -> Self {
        let mut open = None;
        let mut plain: f32 = 0.0;
        for choice in header.split(',') {
            let mut words = choice.split(';').map(str::trim);
            let media = words.next().unwrap_or_default();
            let weight = words.find_map(|word| word.strip_prefix("q=")).map_or(Some(1.0), |q| q.parse().ok());
            let weight: f32 = weight.unwrap_or(0.0);
            match media {
                "application/openmetrics-text" if weight > 0.0 => {
                    open = Some(open.unwrap_or(weight).max(weight));
                }
                "text/plain" | "text/*" | "*/*" => plain = plain.max(weight),
                _ => {}
            }
        }
        if open.is_some_and(|weight| weight >= plain) { Self::OpenMetrics } else { Self::Plain }
    }

    /// The text's media type.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Plain => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

impl Labels {
    /// These names and values, in this order.
    #[must_use]
    pub fn new(pairs: &[(&str, &str)]) -> Self {
        let mut labels = Self::default();
        pairs.iter().for_each(|(name, value)| labels.push(name, value));
        labels
    }

    /// One more.
    pub fn push(&mut self, name: &str, value: &str) {
        if !self.0.is_empty() {
            self.0.push(',');
        }
        self.0.push_str(name);
        self.0.push_str("=\"");
        escape(value, true, &mut self.0);
        self.0.push('"');
    }

    /// Also these.
    #[must_use]
    pub fn and(&self, pairs: &[(&str, &str)]) -> Self {
        let mut labels = self.clone();
        pairs.iter().for_each(|(name, value)| labels.push(name, value));
        labels
    }
}

impl fmt::Display for Labels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Page {
    /// Nothing yet.
    #[must_use]
    pub fn new(format: Format) -> Self {
        Self { format, text: String::new() }
    }

    /// Begins a family. Each may be begun once.
    pub fn family<'a>(&'a mut self, name: &'a str, kind: Kind, help: &'a str) -> Family<'a> {
        Family { page: self, name, kind, help, begun: false }
    }

    /// The text.
    #[must_use]
    pub fn finish(mut self) -> String {
        if self.format == Format::OpenMetrics {
            self.text.push_str("# EOF\n");
        }
        self.text
    }
}

impl Family<'_> {
    /// One sample. A value that is no number, or not there, is left out.
    pub fn sample(&mut self, labels: &Labels, value: impl Into<Value>) {
        let value = value.into();
        let text = &mut self.page.text;
        let begin = text.len();
        if !self.begun {
            header(text, self.page.format, self.name, self.kind, self.help);
        }
        text.push_str(self.name);
        if !labels.0.is_empty() {
            text.push('{');
            text.push_str(&labels.0);
            text.push('}');
        }
        text.push(' ');
        let before = text.len();
        // Writing to a String cannot fail.
        let _ = match value {
            Value::Whole(number) => writeln!(text, "{number}"),
            Value::Real(number) if number.is_finite() => writeln!(text, "{number}"),
            Value::Real(_) | Value::Absent => Ok(()),
        };
        if text.len() == before {
            text.truncate(begin);
        } else {
            self.begun = true;
        }
    }
}

/// A sample's value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// Counted.
    Whole(u64),
    /// Measured.
    Real(f64),
    /// Unknown: no sample.
    Absent,
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Whole(number)
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Self {
        Self::Whole(number.into())
    }
}

impl From<usize> for Value {
    fn from(number: usize) -> Self {
        Self::Whole(number as u64)
    }
}

impl From<bool> for Value {
    fn from(is: bool) -> Self {
        Self::Whole(is.into())
    }
}

impl From<f64> for Value {
    fn from(number: f64) -> Self {
        Self::Real(number)
    }
}

impl<T: Into<Self>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Absent, Into::into)
    }
}

fn header(text: &mut String, format: Format, name: &str, kind: Kind, help: &str) {
    // OpenMetrics names a family without the ending that its type adds to the samples.
    let (family, kind) = match (format, kind) {
        (Format::Plain, Kind::Counter) => (name, "counter"),
        (Format::Plain, Kind::Gauge | Kind::Info) => (name, "gauge"),
        (Format::OpenMetrics, Kind::Gauge) => (name, "gauge"),
        (Format::OpenMetrics, Kind::Counter) => {
            name.strip_suffix("_total").map_or((name, "unknown"), |family| (family, "counter"))
        }
        (Format::OpenMetrics, Kind::Info) => {
            name.strip_suffix("_info").map_or((name, "gauge"), |family| (family, "info"))
        }
    };
    // Writing to a String cannot fail.
    let _ = writeln!(text, "# TYPE {family} {kind}");
    let units = ["bytes", "seconds", "joules", "watts", "celsius", "hertz", "ratio"];
    let unit = family.rsplit_once('_').map(|(_, last)| last).filter(|last| units.contains(last));
    if let Some(unit) = unit.filter(|_| format == Format::OpenMetrics) {
        let _ = writeln!(text, "# UNIT {family} {unit}");
    }
    let _ = write!(text, "# HELP {family} ");
    escape(help, format == Format::OpenMetrics, text);
    text.push('\n');
}

fn escape(value: &str, quotes: bool, text: &mut String) {
    for c in value.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '"' if quotes => text.push_str("\\\""),
            c => text.push(c),
        }
    }
}

/// What may be the name of a metric; anything else becomes `_`, as the client library of Python does it.
#[must_use]
pub fn legal_name(text: &str) -> String {
    let legal = |(place, c): (usize, char)| {
        let allowed = c.is_ascii_alphabetic() || c == '_' || c == ':' || (place > 0 && c.is_ascii_digit());
        if allowed { c } else { '_' }
    };
    text.chars().enumerate().map(legal).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(format: Format) -> String {
        let mut page = Page::new(format);
        let labels = Labels::new(&[("gpu", "0"), ("name", "a\"b\\c\nd")]);
        let mut family = page.family("x_seconds_total", Kind::Counter, "Time \"x\",\nin all.");
        family.sample(&labels, 1.5);
        family.sample(&labels.and(&[("more", "")]), 2u64);
        family.sample(&labels, f64::NAN);
        page.family("nothing", Kind::Gauge, "Never written.").sample(&labels, None::<u64>);
        page.family("facts_info", Kind::Info, "Facts.").sample(&Labels::default(), 1u64);
        page.family("FOREIGN_COUNT", Kind::Counter, "Not ours.").sample(&Labels::default(), 7u64);
        page.finish()
    }

    #[test]
    fn plain() {
        let expected = r#"# TYPE x_seconds_total counter
# HELP x_seconds_total Time "x",\nin all.
x_seconds_total{gpu="0",name="a\"b\\c\nd"} 1.5
x_seconds_total{gpu="0",name="a\"b\\c\nd",more=""} 2
# TYPE facts_info gauge
# HELP facts_info Facts.
facts_info 1
# TYPE FOREIGN_COUNT counter
# HELP FOREIGN_COUNT Not ours.
FOREIGN_COUNT 7
"#;
        assert_eq!(page(Format::Plain), expected);
    }

    #[test]
    fn open_metrics() {
        let expected = r#"# TYPE x_seconds counter
# UNIT x_seconds seconds
# HELP x_seconds Time \"x\",\nin all.
x_seconds_total{gpu="0",name="a\"b\\c\nd"} 1.5
x_seconds_total{gpu="0",name="a\"b\\c\nd",more=""} 2
# TYPE facts info
# HELP facts Facts.
facts_info 1
# TYPE FOREIGN_COUNT unknown
# HELP FOREIGN_COUNT Not ours.
FOREIGN_COUNT 7
# EOF
"#;
        assert_eq!(page(Format::OpenMetrics), expected);
    }

    #[test]
    fn readers_choose() {
        for (header, format) in [
            ("", Format::Plain),
            ("*/*", Format::Plain),
            ("text/plain;version=0.0.4", Format::Plain),
            (
                "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1",
                Format::OpenMetrics,
            ),
            ("application/openmetrics-text;q=0.1, text/plain;q=0.9", Format::Plain),
            ("application/openmetrics-text;q=0", Format::Plain),
            ("application/openmetrics-text; version=1.0.0", Format::OpenMetrics),
            ("text/html, q=x", Format::Plain),
        ] {
            assert_eq!(Format::accepted(header), format, "{header}");
        }
    }

    #[test]
    fn names() {
        assert_eq!(legal_name("gpu-node-01"), "gpu_node_01");
        assert_eq!(legal_name("10.0.0.1"), "_0_0_0_1");
    }

    proptest::proptest! {
        #[test]
        fn a_label_never_breaks_its_line(value in ".{0,60}|(\\PC|\n|\"|\\\\){0,20}") {
            let mut page = Page::new(Format::Plain);
            page.family("m", Kind::Gauge, "h").sample(&Labels::new(&[("l", &value)]), 1u64);
            let text = page.finish();
            proptest::prop_assert_eq!(text.split('\n').count(), 4);
            let written = text.lines().nth(2).unwrap().strip_prefix("m{l=\"").unwrap().strip_suffix("\"} 1").unwrap();
            let mut read = String::new();
            let mut rest = written.chars();
            while let Some(c) = rest.next() {
                match c {
                    '\\' => match rest.next() { Some('n') => read.push('\n'), Some(c) => read.push(c), None => {} },
                    '"' => proptest::prop_assert!(false, "a bare quote"),
                    c => read.push(c),
                }
            }
            proptest::prop_assert_eq!(read, value);
        }
    }
}

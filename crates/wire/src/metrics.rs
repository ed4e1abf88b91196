//! Writes metrics in the two text formats that Prometheus reads: its own (0.0.4) and OpenMetrics
//! 1.0.
//!
//! Agent and scheduler both write their pages with this module instead of a client library: a
//! client library fixes metric names by type (`_total`), and the agent also writes families of
//! other projects that break this rule.
//!
//! Each family is written once with all its samples. The text is always well-formed: label values
//! are escaped, values that are not finite are left out, and a family without samples is not
//! mentioned.

use std::fmt::{self, Write as _};

/// Text format of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// `text/plain; version=0.0.4`.
    #[default]
    Plain,
    /// `application/openmetrics-text; version=1.0.0`.
    OpenMetrics,
}

/// Type of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Value that goes up and down.
    Gauge,
    /// Value that only grows. The name ends in `_total`, except in families of other projects.
    Counter,
    /// Labels with the constant value 1. The name ends in `_info`.
    Info,
    /// Observations counted in buckets, written with [`FamilyWriter::histogram`].
    Histogram,
}

/// Labels in the form in which they stand between braces, ready to be written many times.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Labels(String);

/// A page of metrics that is being written.
#[derive(Debug)]
pub struct MetricsPage {
    format: Format,
    text: String,
}

/// One family that is being written.
#[derive(Debug)]
pub struct FamilyWriter<'a> {
    page: &'a mut MetricsPage,
    name: &'a str,
    kind: MetricKind,
    help: &'a str,
    begun: bool,
}

/// Observations counted in buckets.
#[derive(Clone, Debug)]
pub struct Histogram {
    /// Inclusive upper bounds in ascending order. Observations above the last bound are counted as
    /// well.
    bounds: &'static [f64],
    /// Observations by bucket. The last bucket has no upper bound.
    counts: Vec<u64>,
    sum: f64,
}

impl Format {
    /// Returns the format that a reader prefers by its `Accept` header: OpenMetrics if the header
    /// gives it no less weight than plain text.
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

    /// Returns the media type of the text.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Plain => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

impl Labels {
    /// Returns these names and values in this order.
    #[must_use]
    pub fn new(pairs: &[(&str, &str)]) -> Self {
        let mut labels = Self::default();
        pairs.iter().for_each(|(name, value)| labels.push(name, value));
        labels
    }

    /// Appends one label.
    pub fn push(&mut self, name: &str, value: &str) {
        if !self.0.is_empty() {
            self.0.push(',');
        }
        self.0.push_str(name);
        self.0.push_str("=\"");
        escape(value, true, &mut self.0);
        self.0.push('"');
    }

    /// Returns these labels followed by `pairs`.
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

impl MetricsPage {
    /// Returns an empty page.
    #[must_use]
    pub fn new(format: Format) -> Self {
        Self { format, text: String::new() }
    }

    /// Starts a family. Each family may be started once.
    pub fn family<'a>(&'a mut self, name: &'a str, kind: MetricKind, help: &'a str) -> FamilyWriter<'a> {
        FamilyWriter { page: self, name, kind, help, begun: false }
    }

    /// Returns the text of the page.
    #[must_use]
    pub fn finish(mut self) -> String {
        if self.format == Format::OpenMetrics {
            self.text.push_str("# EOF\n");
        }
        self.text
    }
}

impl FamilyWriter<'_> {
    /// Writes one sample. A value that is absent or not finite is left out.
    pub fn sample(&mut self, labels: &Labels, value: impl Into<Value>) {
        let value = value.into();
        let begin = self.page.text.len();
        if !self.begun {
            header(&mut self.page.text, self.page.format, self.name, self.kind, self.help);
        }
        if self.line("", labels, value) {
            self.begun = true;
        } else {
            self.page.text.truncate(begin);
        }
    }

    /// Writes the sum, the count and the cumulative buckets of a histogram. The label `le` comes
    /// first.
    pub fn histogram(&mut self, labels: &Labels, histogram: &Histogram) {
        if !self.begun {
            header(&mut self.page.text, self.page.format, self.name, self.kind, self.help);
            self.begun = true;
        }
        let count: u64 = histogram.counts.iter().sum();
        self.name_and_labels("_sum", labels);
        // The sum always has a decimal point. Writing to a String cannot fail.
        let _ = writeln!(self.page.text, "{:?}", histogram.sum);
        self.line("_count", labels, Value::Whole(count));
        let mut below = 0;
        let bounds = histogram.bounds.iter().map(|bound| format!("{bound:?}"));
        for (bound, count) in bounds.chain(["+Inf".to_owned()]).zip(&histogram.counts) {
            below += count;
            let mut with_bound = Labels::new(&[("le", &bound)]);
            if !labels.0.is_empty() {
                with_bound.0.push(',');
                with_bound.0.push_str(&labels.0);
            }
            self.line("_bucket", &with_bound, Value::Whole(below));
        }
    }

    /// Writes one line unless the value is absent or not finite. Returns whether it wrote the line.
    fn line(&mut self, suffix: &str, labels: &Labels, value: Value) -> bool {
        if matches!(value, Value::Absent) || matches!(value, Value::Real(number) if !number.is_finite()) {
            return false;
        }
        self.name_and_labels(suffix, labels);
        // Writing to a String cannot fail.
        let _ = match value {
            Value::Whole(number) => writeln!(self.page.text, "{number}"),
            Value::Real(number) => writeln!(self.page.text, "{number}"),
            Value::Absent => Ok(()),
        };
        true
    }

    fn name_and_labels(&mut self, suffix: &str, labels: &Labels) {
        let text = &mut self.page.text;
        text.push_str(self.name);
        text.push_str(suffix);
        if !labels.0.is_empty() {
            text.push('{');
            text.push_str(&labels.0);
            text.push('}');
        }
        text.push(' ');
    }
}

impl Histogram {
    /// Returns a histogram without observations. `bounds` are the upper bounds of the buckets in
    /// ascending order.
    #[must_use]
    pub fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    /// Counts one observation.
    pub fn observe(&mut self, value: f64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        if let Some(count) = self.counts.get_mut(bucket) {
            *count += 1;
        }
        self.sum += value;
    }
}

/// Value of a sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// Whole number.
    Whole(u64),
    /// Real number.
    Real(f64),
    /// Unknown value, for which no sample is written.
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

fn header(text: &mut String, format: Format, name: &str, kind: MetricKind, help: &str) {
    // OpenMetrics names a family without the suffix that its type adds to the samples.
    let (family, kind) = match (format, kind) {
        (Format::Plain, MetricKind::Counter) => (name, "counter"),
        (Format::Plain, MetricKind::Gauge | MetricKind::Info) => (name, "gauge"),
        (Format::OpenMetrics, MetricKind::Gauge) => (name, "gauge"),
        (_, MetricKind::Histogram) => (name, "histogram"),
        (Format::OpenMetrics, MetricKind::Counter) => {
            name.strip_suffix("_total").map_or((name, "unknown"), |family| (family, "counter"))
        }
        (Format::OpenMetrics, MetricKind::Info) => {
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

/// Returns `text` as a legal metric name. Any other character becomes `_`, as in the Python client
/// library.
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
        let mut page = MetricsPage::new(format);
        let labels = Labels::new(&[("gpu", "0"), ("name", "a\"b\\c\nd")]);
        let mut family = page.family("x_seconds_total", MetricKind::Counter, "Time \"x\",\nin all.");
        family.sample(&labels, 1.5);
        family.sample(&labels.and(&[("more", "")]), 2u64);
        family.sample(&labels, f64::NAN);
        page.family("nothing", MetricKind::Gauge, "Never written.").sample(&labels, None::<u64>);
        page.family("facts_info", MetricKind::Info, "Facts.").sample(&Labels::default(), 1u64);
        page.family("FOREIGN_COUNT", MetricKind::Counter, "Not ours.").sample(&Labels::default(), 7u64);
        page.finish()
    }

    #[test]
    fn writes_plain_text() {
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
    fn writes_open_metrics() {
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
    fn writes_histograms_with_cumulative_buckets() {
        let mut histogram = Histogram::new(&[0.5, 1.0]);
        [0.25, 0.5, 1.0, 3.0].into_iter().for_each(|value| histogram.observe(value));
        let mut page = MetricsPage::new(Format::OpenMetrics);
        let mut family = page.family("call_seconds", MetricKind::Histogram, "Time.");
        family.histogram(&Labels::new(&[("verb", "bind")]), &histogram);
        family.histogram(&Labels::default(), &Histogram::new(&[]));
        let expected = r#"# TYPE call_seconds histogram
# UNIT call_seconds seconds
# HELP call_seconds Time.
call_seconds_sum{verb="bind"} 4.75
call_seconds_count{verb="bind"} 4
call_seconds_bucket{le="0.5",verb="bind"} 2
call_seconds_bucket{le="1.0",verb="bind"} 3
call_seconds_bucket{le="+Inf",verb="bind"} 4
call_seconds_sum 0.0
call_seconds_count 0
call_seconds_bucket{le="+Inf"} 0
# EOF
"#;
        assert_eq!(page.finish(), expected);
    }

    #[test]
    fn chooses_the_format_by_the_accept_header() {
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
    fn replaces_illegal_characters_in_names() {
        assert_eq!(legal_name("gpu-node-01"), "gpu_node_01");
        assert_eq!(legal_name("10.0.0.1"), "_0_0_0_1");
    }

    proptest::proptest! {
        #[test]
        fn a_label_never_breaks_its_line(value in ".{0,60}|(\\PC|\n|\"|\\\\){0,20}") {
            let mut page = MetricsPage::new(Format::Plain);
            page.family("m", MetricKind::Gauge, "h").sample(&Labels::new(&[("l", &value)]), 1u64);
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

//! A line chart as SVG.
//!
//! The crate `plotters` would add three crates to replace about half of this file. The labels at the
//! ends of the curves, which must not overlap, would still be our code.

use std::fmt::Write as _;

/// A curve of the chart.
#[derive(Clone, Debug)]
pub(super) struct Curve {
    pub(super) name: String,
    /// Points by ascending x.
    pub(super) points: Vec<(f64, f64)>,
    /// True for a bold curve in front of the others.
    pub(super) highlighted: bool,
}

/// A chart of curves with common axes. Points left of `x_from` or below `y_from` are cut off.
#[derive(Clone, Debug)]
pub(super) struct Chart {
    pub(super) title: String,
    pub(super) subtitle: String,
    pub(super) x_label: String,
    pub(super) y_label: String,
    pub(super) x_from: f64,
    pub(super) y_from: f64,
    pub(super) curves: Vec<Curve>,
}

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 560.0;
const LEFT: f64 = 70.0;
/// Margin for the names at the ends of the curves.
const RIGHT: f64 = 190.0;
const TOP: f64 = 84.0;
const BOTTOM: f64 = 64.0;
/// Smallest vertical distance of two names.
const LABEL_HEIGHT: f64 = 17.0;
const INK: &str = "#1f2933";
const FAINT: &str = "#e4e7eb";
const HIGHLIGHT: &str = "#d6246e";
/// Colours with different lightness, so that readers with colour blindness can distinguish them.
const COLOURS: [&str; 8] =
    ["#3e6ae1", "#0b8457", "#c27803", "#6f42c1", "#007f8c", "#8a5a44", "#52606d", "#a0527a"];

impl Chart {
    /// Returns the chart as an SVG document.
    pub(super) fn svg(&self) -> String {
        let all = || self.curves.iter().flat_map(|curve| &curve.points);
        let x_to = all().map(|point| point.0).fold(self.x_from + 1.0, f64::max);
        let y_to = all().map(|point| point.1).fold(self.y_from + 1.0, f64::max);
        let frame = Frame { x_from: self.x_from, x_to, y_from: self.y_from, y_to: nice_ceiling(y_to) };
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             font-family=\"system-ui, sans-serif\" font-size=\"13\" fill=\"{INK}\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"{LEFT}\" y=\"34\" font-size=\"20\" font-weight=\"600\">{}</text>\n\
             <text x=\"{LEFT}\" y=\"58\" fill=\"#52606d\">{}</text>\n",
            escape(&self.title),
            escape(&self.subtitle)
        );
        self.axes(&mut svg, &frame);
        let mut labels = Vec::new();
        let mut peers = COLOURS.iter().cycle();
        // Highlighted curves are drawn last, so that no other curve covers them.
        let mut curves: Vec<(&Curve, &str)> = Vec::new();
        for curve in &self.curves {
            let colour = if curve.highlighted { HIGHLIGHT } else { peers.next().unwrap_or(&INK) };
            curves.push((curve, colour));
        }
        curves.sort_by_key(|(curve, _)| curve.highlighted);
        for (curve, colour) in curves {
            frame.draw(&mut svg, curve, colour);
            if let Some((_, y)) = curve.points.last() {
                labels.push((frame.y(*y), format!("{} {y:.2}", curve.name), colour, curve.highlighted));
            }
        }
        label_ends(&mut svg, labels);
        svg + "</svg>\n"
    }

    fn axes(&self, svg: &mut String, frame: &Frame) {
        // Writing to a `String` cannot fail in this function and the ones below.
        for tick in ticks(frame.y_from, frame.y_to) {
            let y = frame.y(tick);
            let _ = write!(
                svg,
                "<line x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"{FAINT}\"/>\n\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{tick}</text>\n",
                WIDTH - RIGHT,
                LEFT - 8.0,
                y + 4.0
            );
        }
        for tick in ticks(frame.x_from, frame.x_to) {
            let x = frame.x(tick);
            let _ = writeln!(
                svg,
                "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{tick}</text>",
                HEIGHT - BOTTOM + 20.0
            );
        }
        let _ = write!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n\
             <text transform=\"translate(20 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n",
            (LEFT + WIDTH - RIGHT) / 2.0,
            HEIGHT - 18.0,
            escape(&self.x_label),
            (TOP + HEIGHT - BOTTOM) / 2.0,
            escape(&self.y_label)
        );
    }
}

/// Maps values to positions on the page.
struct Frame {
    x_from: f64,
    x_to: f64,
    y_from: f64,
    y_to: f64,
}

impl Frame {
    fn x(&self, value: f64) -> f64 {
        LEFT + (value - self.x_from) / (self.x_to - self.x_from) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - (value - self.y_from) / (self.y_to - self.y_from) * (HEIGHT - TOP - BOTTOM)
    }

    fn draw(&self, svg: &mut String, curve: &Curve, colour: &str) {
        let visible = curve.points.iter().filter(|(x, y)| *x >= self.x_from && *y >= self.y_from);
        let points: Vec<String> =
            visible.map(|(x, y)| format!("{:.1},{:.1}", self.x(*x), self.y(*y))).collect();
        let width = if curve.highlighted { 3.5 } else { 1.8 };
        let _ = writeln!(
            svg,
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\" stroke-linejoin=\"round\" points=\"{}\"/>",
            points.join(" ")
        );
    }
}

/// Writes the names at the right ends of the curves, moved apart where they would overlap.
fn label_ends(svg: &mut String, mut labels: Vec<(f64, String, &str, bool)>) {
    labels.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut lowest = TOP - LABEL_HEIGHT;
    for (y, text, colour, highlighted) in labels {
        lowest = f64::max(y, lowest + LABEL_HEIGHT);
        let weight = if highlighted { 700 } else { 400 };
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\" font-weight=\"{weight}\">{}</text>",
            WIDTH - RIGHT + 10.0,
            lowest + 4.0,
            escape(&text)
        );
    }
}

/// Returns five to ten round numbers in a range.
fn ticks(from: f64, to: f64) -> Vec<f64> {
    let rough = (to - from) / 7.0;
    let magnitude = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * magnitude).into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(magnitude * 10.0);
    let first = (from / step).ceil();
    (0..)
        .map(|number| (first + f64::from(number)) * step)
        .take_while(|tick| *tick <= to + step * 1e-9)
        .collect()
}

fn nice_ceiling(value: f64) -> f64 {
    (value / 2.0).ceil() * 2.0
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers_within_the_range() {
        assert_eq!(ticks(70.0, 130.0), [70.0, 80.0, 90.0, 100.0, 110.0, 120.0, 130.0]);
        assert_eq!(ticks(71.0, 96.0), [75.0, 80.0, 85.0, 90.0, 95.0]);
        assert_eq!(ticks(70.0, 130.1).len(), 7);
    }

    #[test]
    fn labels_do_not_overlap_and_texts_are_escaped() {
        let curve = |name: &str, end| Curve {
            name: name.to_owned(),
            points: vec![(70.0, 70.0), (130.0, end)],
            highlighted: name == "ours",
        };
        let chart = Chart {
            title: "a < b".to_owned(),
            subtitle: String::new(),
            x_label: "x".to_owned(),
            y_label: "y".to_owned(),
            x_from: 70.0,
            y_from: 70.0,
            curves: vec![curve("ours", 95.0), curve("theirs", 95.1)],
        };
        let svg = chart.svg();
        assert!(svg.contains("a &lt; b"));
        let ends: Vec<f64> = svg
            .lines()
            .filter(|line| line.contains("ours 95") || line.contains("theirs 95"))
            .map(|line| line.split("y=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap())
            .collect();
        assert_eq!(ends.len(), 2);
        assert!((ends[1] - ends[0]).abs() >= LABEL_HEIGHT - 0.1, "{ends:?}");
    }
}

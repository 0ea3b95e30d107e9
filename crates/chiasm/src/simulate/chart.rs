//! One chart with a line for each policy, as SVG paths and as a table.

use std::fmt::Write as _;

use serde::Serialize;

// The size of the drawing and its margins, in SVG units.
const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 200.0;
const LEFT: f64 = 52.0;
const BOTTOM: f64 = 20.0;
const TOP: f64 = 8.0;
const RIGHT: f64 = 16.0;
/// The approximate number of ticks of an axis.
const TARGET_TICKS: f64 = 5.0;
/// The ratio of the largest to the smallest value beyond which an axis is logarithmic.
const LOGARITHMIC_RATIO: f64 = 20.0;

/// The unit of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Milliseconds,
    /// Virtual seconds since the start.
    Seconds,
    /// A fraction from 0 to 1, shown in per cent.
    Fraction,
    /// A multiple of the mean, 1 or more.
    Ratio,
    Workers,
}

/// The data of a chart.
pub(super) struct Plot {
    pub(super) title: String,
    /// [`Unit::Seconds`] or [`Unit::Workers`].
    pub(super) x: Unit,
    pub(super) y: Unit,
    /// The end of the warm-up on the x axis.
    pub(super) warm_up: Option<f64>,
    /// The points of each policy, in the order of policies. All lines have the same x values.
    pub(super) lines: Vec<Vec<(f64, Option<f64>)>>,
}

/// A drawn chart, for the template.
#[derive(Debug, Serialize)]
pub(super) struct Chart {
    title: String,
    width: f64,
    height: f64,
    left: f64,
    top: f64,
    right: f64,
    bottom: f64,
    x: Vec<Tick>,
    y: Vec<Tick>,
    is_logarithmic: bool,
    warm_up: Option<f64>,
    /// The SVG path of each policy.
    paths: Vec<String>,
    x_name: &'static str,
    /// The table's rows: an x value and the value of each policy.
    rows: Vec<(String, Vec<String>)>,
}

#[derive(Debug, Serialize)]
struct Tick {
    /// The position in SVG units.
    at: f64,
    label: String,
}

/// The scale of an axis.
#[derive(Debug)]
struct Axis {
    from: f64,
    to: f64,
    is_logarithmic: bool,
    ticks: Vec<f64>,
}

impl Plot {
    /// Draws the chart.
    pub(super) fn draw(self) -> Chart {
        let xs: Vec<f64> = self.lines.iter().flatten().map(|(x, _)| *x).collect();
        let ys: Vec<f64> = self.lines.iter().flatten().filter_map(|(_, y)| *y).collect();
        let x = if self.x == Unit::Workers {
            Axis::with_tick_per_value(&xs)
        } else {
            Axis::linear_from(0.0, &xs)
        };
        let y = match self.y {
            Unit::Milliseconds if needs_logarithmic_axis(&ys) => Axis::logarithmic(&ys),
            Unit::Ratio => Axis::linear_from(1.0, &ys),
            _ => Axis::linear_from(0.0, &ys),
        };
        let right = WIDTH - RIGHT;
        let bottom = HEIGHT - BOTTOM;
        let x_at = |value: f64| round(LEFT + x.position(value) * (right - LEFT));
        let y_at = |value: f64| round(bottom - y.position(value) * (bottom - TOP));
        let tick = |at: f64, label: String| Tick { at, label };
        Chart {
            width: WIDTH,
            height: HEIGHT,
            left: LEFT,
            top: TOP,
            right,
            bottom,
            x: x.ticks.iter().map(|&value| tick(x_at(value), self.x.format_tick(value))).collect(),
            y: y.ticks.iter().map(|&value| tick(y_at(value), self.y.format_tick(value))).collect(),
            is_logarithmic: y.is_logarithmic,
            warm_up: self.warm_up.map(x_at).filter(|end| *end > LEFT),
            paths: self.lines.iter().map(|line| path(line, x_at, y_at)).collect(),
            x_name: if self.x == Unit::Workers { "workers" } else { "seconds" },
            rows: rows(&self),
            title: self.title,
        }
    }
}

/// Returns the table's rows: each x value with the values of all lines.
fn rows(plot: &Plot) -> Vec<(String, Vec<String>)> {
    let longest_line =
        plot.lines.iter().max_by_key(|line| line.len()).map(Vec::as_slice).unwrap_or_default();
    let format_y = |value: Option<f64>| {
        value.map_or_else(|| "–".to_owned(), |value| plot.y.format_value(value))
    };
    let row = |(index, (x, _)): (usize, &(f64, Option<f64>))| {
        let ys = plot.lines.iter().map(|line| line.get(index).and_then(|(_, y)| *y));
        let cells: Vec<String> = ys.map(format_y).collect();
        (plot.x.format_value(*x), cells)
    };
    longest_line.iter().enumerate().map(row).collect()
}

/// Returns an SVG path through the values, interrupted where values are missing.
fn path(
    points: &[(f64, Option<f64>)],
    x_at: impl Fn(f64) -> f64,
    y_at: impl Fn(f64) -> f64,
) -> String {
    let mut path = String::new();
    let mut is_down = false;
    for (x, y) in points {
        if let Some(y) = y {
            // The empty segment `h0` shows a single point as a dot, by its round caps.
            let (command, end) = if is_down { ('L', "") } else { ('M', "h0") };
            let _ = write!(path, "{command}{} {}{end}", x_at(*x), y_at(*y));
        }
        is_down = y.is_some();
    }
    path
}

fn round(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

fn needs_logarithmic_axis(values: &[f64]) -> bool {
    let (min, max) = min_max(values.iter().copied().filter(|value| *value > 0.0));
    min.is_finite() && max > LOGARITHMIC_RATIO * min
}

/// Returns the minimum and the maximum; infinities without values.
fn min_max(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(min, max), value| {
        (min.min(value), max.max(value))
    })
}

impl Axis {
    /// Creates a linear axis with round ticks from `from` to at least the maximum. No value may be
    /// below `from`.
    fn linear_from(from: f64, values: &[f64]) -> Self {
        let length = min_max(values.iter().copied()).1 - from;
        let length = if length.is_finite() && length > 0.0 { length } else { 1.0 };
        let step = tick_step(length);
        let count = (length / step).ceil();
        let ticks = (0..=count as u32).map(|number| from + f64::from(number) * step).collect();
        Self { from, to: from + count * step, is_logarithmic: false, ticks }
    }

    /// Creates a linear axis from the minimum to the maximum, with one tick per distinct value.
    fn with_tick_per_value(values: &[f64]) -> Self {
        let mut ticks = values.to_vec();
        ticks.sort_by(f64::total_cmp);
        ticks.dedup();
        let (from, to) = min_max(ticks.iter().copied());
        Self { from, to, is_logarithmic: false, ticks }
    }

    /// Creates a logarithmic axis. Values that are not positive lie at its lower end.
    fn logarithmic(values: &[f64]) -> Self {
        let (min, max) = min_max(values.iter().copied().filter(|value| *value > 0.0));
        let powers = min.log10().floor() as i32..=max.log10().ceil() as i32;
        let all = powers.flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10_f64.powi(power)));
        let mut ticks: Vec<f64> = all.collect();
        let first = ticks.iter().rposition(|tick| *tick <= min).unwrap_or(0);
        let last = ticks.iter().position(|tick| *tick >= max).unwrap_or(ticks.len() - 1);
        ticks = ticks[first..=last].to_vec();
        Self { from: ticks[0], to: ticks[ticks.len() - 1], is_logarithmic: true, ticks }
    }

    /// Returns the position of a value on the axis, from 0 to 1.
    fn position(&self, value: f64) -> f64 {
        let scaled =
            |value: f64| if self.is_logarithmic { value.max(self.from).ln() } else { value };
        let length = scaled(self.to) - scaled(self.from);
        if length > 0.0 {
            ((scaled(value) - scaled(self.from)) / length).clamp(0.0, 1.0)
        } else {
            0.5
        }
    }
}

/// Returns 1, 2 or 5 times a power of ten, so that about [`TARGET_TICKS`] steps cover `length`.
fn tick_step(length: f64) -> f64 {
    let min_step = length / TARGET_TICKS;
    let power = 10_f64.powf(min_step.log10().floor());
    [1.0, 2.0, 5.0]
        .into_iter()
        .map(|digit| digit * power)
        .find(|step| *step >= min_step)
        .unwrap_or(10.0 * power)
}

impl Unit {
    /// Formats a round number beside an axis.
    fn format_tick(self, value: f64) -> String {
        match self {
            Self::Milliseconds if value >= 1000.0 => format!("{} s", trimmed(value / 1000.0)),
            Self::Milliseconds => format!("{} ms", trimmed(value)),
            Self::Seconds => format!("{} s", trimmed(value)),
            Self::Fraction => format!("{} %", trimmed(value * 100.0)),
            Self::Ratio | Self::Workers => trimmed(value),
        }
    }

    /// Formats a number in a table.
    pub(super) fn format_value(self, value: f64) -> String {
        match self {
            Self::Milliseconds => format!("{value:.1} ms"),
            Self::Seconds => format!("{value:.1} s"),
            Self::Fraction => format!("{:.1} %", value * 100.0),
            Self::Ratio => format!("{value:.2}"),
            Self::Workers => trimmed(value),
        }
    }
}

/// Formats a number with up to three decimals, without trailing zeros.
fn trimmed(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(y: Unit, values: &[Option<f64>]) -> Chart {
        let line = values.iter().enumerate().map(|(at, value)| (at as f64, *value)).collect();
        Plot { title: "t".to_owned(), x: Unit::Seconds, y, warm_up: Some(1.0), lines: vec![line] }
            .draw()
    }

    fn labels(ticks: &[Tick]) -> Vec<&str> {
        ticks.iter().map(|tick| tick.label.as_str()).collect()
    }

    #[test]
    fn linear_axis_has_round_ticks_beyond_maximum() {
        let chart = plot(Unit::Fraction, &[Some(0.1), Some(0.83)]);
        assert_eq!(labels(&chart.y), ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]);
        assert_eq!((chart.y[0].at, chart.y[5].at), (chart.bottom, chart.top));
        for max in [1e-9, 0.3, 1.0, 7.0, 99.9, 1e12] {
            let axis = Axis::linear_from(0.0, &[max]);
            assert!(axis.to >= max && (2..=7).contains(&axis.ticks.len()), "{axis:?}");
        }
        assert_eq!(
            labels(&plot(Unit::Fraction, &[None]).y)[0],
            "0 %",
            "a chart without values has an axis, too"
        );
        assert_eq!(
            labels(&plot(Unit::Ratio, &[Some(1.0), Some(1.31)]).y),
            ["1", "1.1", "1.2", "1.3", "1.4"]
        );
    }

    #[test]
    fn wide_range_of_times_uses_logarithmic_axis() {
        let chart = plot(Unit::Milliseconds, &[Some(12.0), Some(1900.0)]);
        assert_eq!(
            labels(&chart.y),
            ["10 ms", "20 ms", "50 ms", "100 ms", "200 ms", "500 ms", "1 s", "2 s"]
        );
        let gaps: Vec<f64> =
            [(0, 3), (3, 6)].map(|(from, to)| chart.y[from].at - chart.y[to].at).into();
        assert!((gaps[0] - gaps[1]).abs() < 0.2 && chart.is_logarithmic, "{gaps:?}");
        assert!(!plot(Unit::Milliseconds, &[Some(100.0), Some(1900.0)]).is_logarithmic);
        assert!(!plot(Unit::Milliseconds, &[Some(0.0), Some(0.0)]).is_logarithmic);
    }

    #[test]
    fn line_is_interrupted_at_missing_value() {
        let chart = plot(Unit::Ratio, &[Some(1.0), Some(2.0), None, Some(2.0)]);
        assert_eq!(chart.paths, ["M52 180h0L182.7 8M444 8h0"]);
        assert_eq!(chart.rows[2], ("2.0 s".to_owned(), vec!["–".to_owned()]));
        assert_eq!(chart.warm_up, Some(182.7));
    }
}

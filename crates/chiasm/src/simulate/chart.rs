//! One chart: a line for each policy, as a drawing and as a table.

use std::fmt::Write as _;

use serde::Serialize;

/// Size of the drawing, and room for the numbers beside its axes.
const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 200.0;
const LEFT: f64 = 52.0;
const BOTTOM: f64 = 20.0;
const TOP: f64 = 8.0;
const RIGHT: f64 = 16.0;
/// Numbers at an axis, about.
const TICKS: f64 = 5.0;
/// A largest value of more than so many times the smallest one calls for a scale of powers.
const WIDE: f64 = 20.0;

/// What numbers are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// Milliseconds.
    Time,
    /// Virtual seconds since the start.
    Seconds,
    /// Parts of one.
    Part,
    /// How many times the mean: one or more.
    Ratio,
    Workers,
}

/// What is drawn.
pub(super) struct Plot {
    pub(super) title: String,
    pub(super) x: Unit,
    pub(super) y: Unit,
    /// Until here nothing counts.
    pub(super) warm_up: Option<f64>,
    /// Points of each policy, in the order of policies; all have the same places on the x axis.
    pub(super) lines: Vec<Vec<(f64, Option<f64>)>>,
}

/// A drawing, ready for the template.
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
    /// The paths of the policies.
    paths: Vec<String>,
    x_name: &'static str,
    /// A place on the x axis and each policy's value there.
    rows: Vec<(String, Vec<String>)>,
}

#[derive(Debug, Serialize)]
struct Tick {
    at: f64,
    label: String,
}

/// Where values lie along an axis.
#[derive(Debug)]
struct Axis {
    from: f64,
    to: f64,
    is_logarithmic: bool,
    ticks: Vec<f64>,
}

impl Plot {
    pub(super) fn draw(self) -> Chart {
        let xs: Vec<f64> = self.lines.iter().flatten().map(|(x, _)| *x).collect();
        let ys: Vec<f64> = self.lines.iter().flatten().filter_map(|(_, y)| *y).collect();
        let x = if self.x == Unit::Workers { Axis::between(&xs) } else { Axis::above(0.0, &xs) };
        let y = match self.y {
            Unit::Time if is_wide(&ys) => Axis::of_powers(&ys),
            Unit::Ratio => Axis::above(1.0, &ys),
            _ => Axis::above(0.0, &ys),
        };
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let x_at = |value: f64| round(LEFT + x.part(value) * (right - LEFT));
        let y_at = |value: f64| round(bottom - y.part(value) * (bottom - TOP));
        let tick = |at: f64, label: String| Tick { at, label };
        Chart {
            width: WIDTH,
            height: HEIGHT,
            left: LEFT,
            top: TOP,
            right,
            bottom,
            x: x.ticks.iter().map(|&value| tick(x_at(value), self.x.short(value))).collect(),
            y: y.ticks.iter().map(|&value| tick(y_at(value), self.y.short(value))).collect(),
            is_logarithmic: y.is_logarithmic,
            warm_up: self.warm_up.map(x_at).filter(|until| *until > LEFT),
            paths: self.lines.iter().map(|line| path(line, x_at, y_at)).collect(),
            x_name: self.x.name(),
            rows: rows(&self),
            title: self.title,
        }
    }
}

/// The places, each with the values of all lines.
fn rows(plot: &Plot) -> Vec<(String, Vec<String>)> {
    let places =
        plot.lines.iter().max_by_key(|line| line.len()).map(Vec::as_slice).unwrap_or_default();
    let value =
        |line: &Vec<(f64, Option<f64>)>, at: usize| line.get(at).and_then(|(_, value)| *value);
    let told =
        |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |value| plot.y.long(value));
    let of_place = |at| plot.lines.iter().map(|line| told(value(line, at))).collect();
    places.iter().enumerate().map(|(at, (place, _))| (plot.x.long(*place), of_place(at))).collect()
}

/// A line through the values that there are; where there is none it breaks off.
fn path(
    points: &[(f64, Option<f64>)],
    x_at: impl Fn(f64) -> f64,
    y_at: impl Fn(f64) -> f64,
) -> String {
    let mut path = String::new();
    let mut is_down = false;
    for (x, y) in points {
        if let Some(y) = y {
            // A point alone is seen as a dot, by its round ends.
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

fn is_wide(values: &[f64]) -> bool {
    let (least, most) = ends(values.iter().copied().filter(|value| *value > 0.0));
    least.is_finite() && most > WIDE * least
}

fn ends(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), value| {
        (least.min(value), most.max(value))
    })
}

impl Axis {
    /// From a number that no value is below, up in round steps until none is above.
    fn above(from: f64, values: &[f64]) -> Self {
        let most = ends(values.iter().copied()).1 - from;
        let most = if most.is_finite() && most > 0.0 { most } else { 1.0 };
        let step = step(most);
        let count = (most / step).ceil();
        let ticks = (0..=count as u32).map(|number| from + f64::from(number) * step).collect();
        Self { from, to: from + count * step, is_logarithmic: false, ticks }
    }

    /// From the least to the most of a few values, each of which is named.
    fn between(values: &[f64]) -> Self {
        let mut ticks = values.to_vec();
        ticks.sort_by(f64::total_cmp);
        ticks.dedup();
        let (from, to) = ends(ticks.iter().copied());
        Self { from, to, is_logarithmic: false, ticks }
    }

    /// Equal lengths are equal ratios. Values that are not above zero lie at its lower end.
    fn of_powers(values: &[f64]) -> Self {
        let (least, most) = ends(values.iter().copied().filter(|value| *value > 0.0));
        let powers = least.log10().floor() as i32..=most.log10().ceil() as i32;
        let all = powers.flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10_f64.powi(power)));
        let mut ticks: Vec<f64> = all.collect();
        let first = ticks.iter().rposition(|tick| *tick <= least).unwrap_or(0);
        let last = ticks.iter().position(|tick| *tick >= most).unwrap_or(ticks.len() - 1);
        ticks = ticks[first..=last].to_vec();
        Self { from: ticks[0], to: ticks[ticks.len() - 1], is_logarithmic: true, ticks }
    }

    /// Where on it a value is, 0 to 1.
    fn part(&self, value: f64) -> f64 {
        let place =
            |value: f64| if self.is_logarithmic { value.max(self.from).ln() } else { value };
        let length = place(self.to) - place(self.from);
        if length > 0.0 {
            ((place(value) - place(self.from)) / length).clamp(0.0, 1.0)
        } else {
            0.5
        }
    }
}

/// 1, 2 or 5 times a power of ten, so that about [`TICKS`] of it reach `most`.
fn step(most: f64) -> f64 {
    let least = most / TICKS;
    let power = 10_f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0]
        .into_iter()
        .map(|digit| digit * power)
        .find(|step| *step >= least)
        .unwrap_or(10.0 * power)
}

impl Unit {
    /// A heading for numbers of it.
    fn name(self) -> &'static str {
        match self {
            Self::Time => "time",
            Self::Seconds => "seconds",
            Self::Part => "part",
            Self::Ratio => "times",
            Self::Workers => "workers",
        }
    }

    /// A round number beside an axis.
    fn short(self, value: f64) -> String {
        match self {
            Self::Time if value >= 1000.0 => format!("{} s", trimmed(value / 1000.0)),
            Self::Time => format!("{} ms", trimmed(value)),
            Self::Seconds => format!("{} s", trimmed(value)),
            Self::Part => format!("{} %", trimmed(value * 100.0)),
            Self::Ratio | Self::Workers => trimmed(value),
        }
    }

    /// A number in a table.
    pub(super) fn long(self, value: f64) -> String {
        match self {
            Self::Time => format!("{value:.1} ms"),
            Self::Seconds => format!("{value:.1} s"),
            Self::Part => format!("{:.1} %", value * 100.0),
            Self::Ratio => format!("{value:.2}"),
            Self::Workers => trimmed(value),
        }
    }
}

/// Without the digits that only rounding makes.
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
    fn axes_have_round_numbers_and_room_for_every_value() {
        let chart = plot(Unit::Part, &[Some(0.1), Some(0.83)]);
        assert_eq!(labels(&chart.y), ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]);
        assert_eq!((chart.y[0].at, chart.y[5].at), (chart.bottom, chart.top));
        for most in [1e-9, 0.3, 1.0, 7.0, 99.9, 1e12] {
            let axis = Axis::above(0.0, &[most]);
            assert!(axis.to >= most && (2..=7).contains(&axis.ticks.len()), "{axis:?}");
        }
        assert_eq!(
            labels(&plot(Unit::Part, &[None]).y)[0],
            "0 %",
            "without a value there is an axis still"
        );
        assert_eq!(
            labels(&plot(Unit::Ratio, &[Some(1.0), Some(1.31)]).y),
            ["1", "1.1", "1.2", "1.3", "1.4"]
        );
    }

    #[test]
    fn times_that_differ_much_are_drawn_by_their_ratios() {
        let chart = plot(Unit::Time, &[Some(12.0), Some(1900.0)]);
        assert_eq!(
            labels(&chart.y),
            ["10 ms", "20 ms", "50 ms", "100 ms", "200 ms", "500 ms", "1 s", "2 s"]
        );
        let gaps: Vec<f64> =
            [(0, 3), (3, 6)].map(|(from, to)| chart.y[from].at - chart.y[to].at).into();
        assert!((gaps[0] - gaps[1]).abs() < 0.2 && chart.is_logarithmic, "{gaps:?}");
        assert!(!plot(Unit::Time, &[Some(100.0), Some(1900.0)]).is_logarithmic);
        assert!(!plot(Unit::Time, &[Some(0.0), Some(0.0)]).is_logarithmic);
    }

    #[test]
    fn a_line_breaks_off_where_there_is_no_value() {
        let chart = plot(Unit::Ratio, &[Some(1.0), Some(2.0), None, Some(2.0)]);
        assert_eq!(chart.paths, ["M52 180h0L182.7 8M444 8h0"]);
        assert_eq!(chart.rows[2], ("2.0 s".to_owned(), vec!["–".to_owned()]));
        assert_eq!(chart.warm_up, Some(182.7));
    }
}

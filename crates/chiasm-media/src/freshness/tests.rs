use proptest::prelude::*;

use super::*;

const BOUNDS: FreshnessBounds =
    FreshnessBounds { min: Duration::ZERO, max: Duration::from_secs(1000) };

/// The moment at which all answers of these tests come, with [`NOW`].
const DATE: SystemTime = SystemTime::UNIX_EPOCH;
const NOW: u64 = 1_700_000_000;

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn wall(offset: i64) -> String {
    httpdate::fmt_http_date(DATE + secs(NOW.checked_add_signed(offset).unwrap()))
}

fn url() -> Url {
    Url::parse("https://example.com/a?b#c").unwrap()
}

fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for &(name, value) in lines {
        headers.append(HeaderName::from_static(name), HeaderValue::from_str(value).unwrap());
    }
    headers
}

/// Headers that come at `at`, at once after asking.
fn at(at: Instant) -> Received {
    Received { asked: at, at, date: DATE + secs(NOW) }
}

fn of_at(start: Instant, lines: &[(&'static str, &str)]) -> Freshness {
    Freshness::of(&url(), &headers(lines), at(start), RedirectFreshness::none(), BOUNDS)
}

/// The number of seconds for which the answer is fresh.
fn fresh_for(freshness: &Freshness, start: Instant) -> u64 {
    let seconds = (0..=2000).find(|&seconds| !freshness.is_fresh(start + secs(seconds))).unwrap();
    assert!(!freshness.is_fresh(start + secs(100_000)));
    seconds
}

fn seconds_of(lines: &[(&'static str, &str)]) -> u64 {
    let start = Instant::now();
    fresh_for(&of_at(start, lines), start)
}

#[test]
fn an_answer_is_fresh_for_as_long_as_it_says() {
    assert_eq!(seconds_of(&[("cache-control", "max-age=60")]), 60);
    assert_eq!(seconds_of(&[("cache-control", "max-age=60, s-maxage=70")]), 70);
    assert_eq!(seconds_of(&[("expires", &wall(50)), ("date", &wall(0))]), 50);
    assert_eq!(seconds_of(&[("expires", &wall(50))]), 50);
    assert_eq!(seconds_of(&[("expires", &wall(50)), ("cache-control", "max-age=60")]), 60);
    assert_eq!(seconds_of(&[("expires", &wall(50)), ("cache-control", "public")]), 50);
    assert_eq!(seconds_of(&[("cache-control", "max-age=60, must-revalidate")]), 60);
}

#[test]
fn what_it_does_not_say_is_not_guessed() {
    let modified = wall(-1_000_000);
    for lines in [
        &[][..],
        &[("last-modified", modified.as_str())],
        &[("cache-control", "public, immutable, stale-while-revalidate=100, stale-if-error=100")],
        &[("cache-control", "no-cache, max-age=60")],
        &[("cache-control", "no-cache=\"x\", max-age=60")],
        &[("cache-control", "max-age=0")],
        &[("pragma", "No-Cache"), ("expires", &wall(50))],
        &[("expires", "0")],
        &[("expires", "tomorrow")],
        &[("expires", &wall(-1))],
        &[("expires", &wall(50)), ("expires", &wall(50))],
        &[("cache-control", "max-age=60"), ("age", "60")],
        &[("cache-control", "max-age=60"), ("age", "old")],
    ] {
        assert_eq!(seconds_of(lines), 0, "{lines:?}");
    }
}

#[test]
fn time_on_the_way_counts() {
    assert_eq!(seconds_of(&[("cache-control", "max-age=60"), ("age", "20")]), 40);
    assert_eq!(seconds_of(&[("cache-control", "max-age=60"), ("date", &wall(-25))]), 35);
    assert_eq!(
        seconds_of(&[("cache-control", "max-age=60"), ("age", "20"), ("date", &wall(-25))]),
        35
    );
    // A clock that is ahead makes nothing younger.
    assert_eq!(seconds_of(&[("cache-control", "max-age=60"), ("date", &wall(500))]), 60);
    let asked = Instant::now();
    let received = Received { asked, at: asked + secs(7), date: DATE + secs(NOW) };
    let headers = headers(&[("cache-control", "max-age=60"), ("age", "20")]);
    let freshness = Freshness::of(&url(), &headers, received, RedirectFreshness::none(), BOUNDS);
    assert_eq!(fresh_for(&freshness, received.at), 33);
}

#[test]
fn the_operator_bounds_what_origins_say() {
    let start = Instant::now();
    let bounds = FreshnessBounds { min: secs(10), max: secs(100) };
    for (control, expected) in [
        ("max-age=5", 10),
        ("max-age=50", 50),
        ("max-age=500", 100),
        ("no-cache", 10),
        ("max-age=4294967296", 100),
    ] {
        let headers = headers(&[("cache-control", control)]);
        let freshness =
            Freshness::of(&url(), &headers, at(start), RedirectFreshness::none(), bounds);
        assert_eq!(fresh_for(&freshness, start), expected, "{control}");
        assert!(freshness.may_be_stored());
    }
    for control in ["no-store", "private, max-age=50"] {
        let headers = headers(&[("cache-control", control)]);
        assert!(
            !Freshness::of(&url(), &headers, at(start), RedirectFreshness::none(), bounds)
                .may_be_stored()
        );
    }
}

#[test]
fn what_must_not_be_stored_is_not() {
    let start = Instant::now();
    for (name, value) in [
        ("cache-control", "no-store"),
        ("cache-control", "private"),
        ("cache-control", "private=\"x\""),
        ("vary", "*"),
        ("vary", "accept, *"),
    ] {
        let lines = [("etag", "\"1\""), ("cache-control", "max-age=60"), (name, value)];
        assert!(!of_at(start, &lines).may_be_stored(), "{name}: {value}");
    }
    for lines in [
        &[("etag", "\"1\"")][..],
        &[("cache-control", "max-age=60")],
        &[("cache-control", "max-age=60"), ("vary", "accept, accept-encoding, cookie, origin")],
        &[("cache-control", "max-age=60"), ("set-cookie", "a=b")],
        &[("cache-control", "no-cache"), ("etag", "\"1\"")],
    ] {
        assert!(of_at(start, lines).may_be_stored(), "{lines:?}");
    }
    // Neither fresh nor to be asked about.
    assert!(!of_at(start, &[]).may_be_stored());
    let mut forbidden = of_at(start, &[("cache-control", "max-age=60")]);
    forbidden.forbid_storing();
    assert!(!forbidden.may_be_stored());
}

#[test]
fn a_redirect_is_part_of_the_way() {
    let start = Instant::now();
    let path = |redirects: &[(bool, &str)]| {
        let mut path = RedirectFreshness::none();
        for &(permanent, control) in redirects {
            let line = [("cache-control", control)];
            let headers = headers(if control.is_empty() { &[] } else { &line });
            path.follow(permanent, &headers, at(start), BOUNDS);
        }
        Freshness::of(&url(), &headers(&[("cache-control", "max-age=60")]), at(start), path, BOUNDS)
    };
    for (redirects, expected) in [
        (&[(true, "")][..], 60),
        (&[(false, "")], 0),
        (&[(true, "max-age=20")], 20),
        (&[(true, "no-cache")], 0),
        (&[(false, "max-age=500")], 60),
        (&[(false, "max-age=30"), (true, "max-age=20"), (false, "max-age=40")], 20),
    ] {
        let freshness = path(redirects);
        assert_eq!(fresh_for(&freshness, start), expected, "{redirects:?}");
        assert_eq!(freshness.may_be_stored(), expected > 0, "{redirects:?}");
    }
    assert!(!path(&[(true, "no-store"), (false, "max-age=500")]).may_be_stored());
    assert!(!path(&[(true, ""), (false, "private, max-age=500")]).may_be_stored());
}

fn condition(lines: &[(&'static str, &str)]) -> Option<(HeaderName, HeaderValue)> {
    of_at(Instant::now(), lines).condition(&url())
}

#[test]
fn only_the_url_that_gave_a_validator_is_asked_with_it() {
    let freshness = of_at(Instant::now(), &[("etag", "\"1\"")]);
    assert_eq!(
        freshness.condition(&url()),
        Some((IF_NONE_MATCH, HeaderValue::from_static("\"1\"")))
    );
    assert!(
        freshness.condition(&Url::parse("https://EXAMPLE.com:443/a?b#other").unwrap()).is_some()
    );
    for other in ["https://example.com/a", "http://example.com/a?b", "https://example.com/A?b"] {
        assert_eq!(freshness.condition(&Url::parse(other).unwrap()), None, "{other}");
    }
}

#[test]
fn only_sound_validators_are_used() {
    for tag in ["\"1\"", "W/\"1\"", "\"\"", "\"a,b\""] {
        assert_eq!(
            condition(&[("etag", tag)]),
            Some((IF_NONE_MATCH, HeaderValue::from_str(tag).unwrap()))
        );
    }
    let long = format!("\"{}\"", "x".repeat(600));
    for tag in ["1", "\"1", "w/\"1\"", "\"1\", \"2\"", "*", "", "\"", "W/", &long] {
        assert_eq!(condition(&[("etag", tag)]), None, "{tag}");
    }
    assert_eq!(condition(&[("etag", "\"1\""), ("etag", "\"2\"")]), None);

    let (settled, recent) = (wall(-60), wall(-59));
    let asked = condition(&[("last-modified", &settled)]);
    assert_eq!(asked, Some((IF_MODIFIED_SINCE, HeaderValue::from_str(&settled).unwrap())));
    // It may change once more within the same second.
    assert_eq!(condition(&[("last-modified", &recent)]), None);
    assert_eq!(condition(&[("last-modified", &settled), ("date", &wall(-30))]), None);
    assert_eq!(condition(&[("last-modified", &wall(100))]), None);
    assert_eq!(condition(&[("last-modified", "yesterday")]), None);
    let (name, _) = condition(&[("last-modified", &settled), ("etag", "\"1\"")]).unwrap();
    assert_eq!(name, IF_NONE_MATCH);
}

#[test]
fn not_modified_makes_it_fresh_again() {
    let start = Instant::now();
    let old = of_at(start, &[("etag", "\"1\""), ("cache-control", "max-age=60")]);
    let later = start + secs(100);
    for (said, expected) in [
        (&[][..], 60),
        (&[("age", "5")], 55),
        (&[("cache-control", "max-age=30")], 30),
        (&[("cache-control", "no-cache")], 0),
        (&[("cache-control", "public")], 0),
        (&[("expires", "0")], 0),
    ] {
        let refreshed = old.clone().refreshed(of_at(later, said));
        assert_eq!(fresh_for(&refreshed, later), expected, "{said:?}");
        assert!(refreshed.may_be_stored() && refreshed.can_revalidate(), "{said:?}");
        assert_eq!(refreshed.condition(&url()), old.condition(&url()));
    }
    assert!(!old.clone().refreshed(of_at(later, &[("cache-control", "no-store")])).may_be_stored());
    for (said, expected) in
        [("no-cache", 0), ("max-age=60", 60), ("s-maxage=10", 10), ("public", 900)]
    {
        let old = of_at(start, &[("etag", "\"1\""), ("cache-control", said)]);
        let by = of_at(later, &[("expires", &wall(900))]);
        assert_eq!(fresh_for(&old.refreshed(by), later), expected, "an `Expires` after {said}");
    }
    // An `Expires` that was said before is a moment, whatever the date of the 304 is.
    let expiring = of_at(start, &[("etag", "\"1\""), ("expires", &wall(150))]);
    for said in [&[][..], &[("cache-control", "public")]] {
        let refreshed = expiring.clone().refreshed(of_at(later, said));
        assert_eq!(fresh_for(&refreshed, later), 50, "{said:?}");
        assert_eq!(
            fresh_for(&refreshed.refreshed(of_at(later + secs(100), &[])), later + secs(100)),
            0
        );
    }
    // The way there is as it is now, not as it was.
    let mut redirect = RedirectFreshness::none();
    redirect.follow(false, &headers(&[("cache-control", "max-age=3")]), at(later), BOUNDS);
    let by = Freshness::of(&url(), &headers(&[]), at(later), redirect, BOUNDS);
    assert_eq!(fresh_for(&old.refreshed(by), later), 3);
}

#[test]
fn not_modified_keeps_the_validators_that_it_does_not_name() {
    let start = Instant::now();
    let old = of_at(start, &[("etag", "W/\"1\""), ("last-modified", &wall(-100))]);
    let refreshed = old.clone().refreshed(of_at(start, &[("last-modified", &wall(-90))]));
    assert_eq!(refreshed.condition(&url()).unwrap().1, "W/\"1\"");
    let refreshed = old.refreshed(of_at(start, &[("etag", "\"1\"")]));
    assert_eq!(refreshed.condition(&url()).unwrap().1, "\"1\"");
}

#[test]
fn not_modified_about_another_answer_confirms_nothing() {
    let known = of_at(Instant::now(), &[("etag", "\"1\"")]);
    assert!(known.is_confirmed_by(&headers(&[])));
    assert!(known.is_confirmed_by(&headers(&[("etag", "\"1\"")])));
    assert!(known.is_confirmed_by(&headers(&[("etag", "W/\"1\"")])));
    assert!(!known.is_confirmed_by(&headers(&[("etag", "\"2\"")])));
}

const CONTROLS: [&str; 14] = [
    "max-age=5",
    "max-age=60",
    "max-age=900",
    "max-age=x",
    "s-maxage=30",
    "no-cache",
    "no-store",
    "private",
    "public",
    "must-revalidate",
    "immutable",
    "x=\"a,b\"",
    "x=\"",
    "stale-if-error=900",
];

proptest! {
    /// Whatever else is said: forbidden means forbidden, no answer outlives its ages or bounds, and
    /// staleness is for good.
    #[test]
    fn no_answer_lives_longer_than_allowed(
        controls in prop::collection::vec(prop::sample::select(&CONTROLS[..]), 0..4),
        age in prop::option::of(0u64..100),
        date in prop::option::of(-100i64..100),
        expires in prop::option::of(-100i64..2000),
        (min, max) in (0u64..20, 20u64..1000),
        probe in 0u64..1500,
    ) {
        let mut map = headers(&[("etag", "\"1\"")]);
        for control in &controls {
            map.append("cache-control", HeaderValue::from_static(control));
        }
        let numbers = [("age", age.map(|age| age.to_string())), ("date", date.map(wall)), ("expires", expires.map(wall))];
        for (name, value) in numbers {
            if let Some(value) = value {
                map.append(name, HeaderValue::from_str(&value).unwrap());
            }
        }
        let start = Instant::now();
        let bounds = FreshnessBounds { min: secs(min), max: secs(max) };
        let freshness = Freshness::of(&url(), &map, at(start), RedirectFreshness::none(), bounds);

        let forbidden = controls.iter().any(|control| ["no-store", "private", "x=\""].contains(control));
        prop_assert_eq!(freshness.may_be_stored(), !forbidden);
        let fresh = freshness.is_fresh(start + secs(probe));
        prop_assert_eq!(fresh || probe >= min, true);
        prop_assert!(!fresh || probe < max);
        if fresh {
            prop_assert!(probe == 0 || freshness.is_fresh(start + secs(probe - 1)));
            if probe >= min {
                let explicit = controls.iter().filter_map(|control| match *control {
                    "max-age=5" => Some(5),
                    "max-age=60" => Some(60),
                    "max-age=900" => Some(900),
                    "s-maxage=30" => Some(30),
                    _ => None,
                });
                let said = explicit.chain(expires.map(|at| at.saturating_sub(date.unwrap_or(0)).max(0) as u64)).max();
                prop_assert!(said.is_some_and(|said| probe + age.unwrap_or(0) < said));
                prop_assert!(!controls.contains(&"no-cache"));
            }
        }
    }

    /// No bytes make it panic.
    #[test]
    fn any_bytes_are_read(
        values in prop::collection::vec((0usize..8, prop::collection::vec(any::<u8>(), 0..40)), 0..8),
    ) {
        let names = [super::DATE, EXPIRES, AGE, ETAG, LAST_MODIFIED, PRAGMA, VARY, reqwest::header::CACHE_CONTROL];
        let mut map = HeaderMap::new();
        for (name, value) in values {
            if let Ok(value) = HeaderValue::from_bytes(&value) {
                map.append(names[name].clone(), value);
            }
        }
        let start = Instant::now();
        let freshness = Freshness::of(&url(), &map, at(start), RedirectFreshness::none(), BOUNDS);
        prop_assert_eq!(freshness.can_revalidate(), freshness.condition(&url()).is_some());
        let again = freshness.clone().refreshed(freshness);
        prop_assert!(!again.is_fresh(start + BOUNDS.max));
    }
}

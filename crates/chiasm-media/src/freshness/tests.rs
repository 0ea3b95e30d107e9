use proptest::prelude::*;

use super::*;

const BOUNDS: FreshnessBounds =
    FreshnessBounds { min: Duration::ZERO, max: Duration::from_secs(1000) };

/// The epoch of the tests' wall clock. Answers are received [`NOW`] seconds later.
const DATE: SystemTime = SystemTime::UNIX_EPOCH;
const NOW: u64 = 1_700_000_000;

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Returns the HTTP date `offset` seconds after [`NOW`].
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

/// Returns the times of an answer that is received at `at`, without delay after its request.
fn received(at: Instant) -> Received {
    Received { requested_at: at, at, date: DATE + secs(NOW) }
}

/// Returns the freshness of an answer with these headers, received at `start`.
fn freshness(start: Instant, lines: &[(&'static str, &str)]) -> Freshness {
    Freshness::from_answer(
        &url(),
        &headers(lines),
        received(start),
        RedirectFreshness::none(),
        BOUNDS,
    )
}

/// Returns the number of seconds for which an answer is fresh.
fn fresh_seconds(freshness: &Freshness, start: Instant) -> u64 {
    let seconds = (0..=2000).find(|&seconds| !freshness.is_fresh(start + secs(seconds))).unwrap();
    assert!(!freshness.is_fresh(start + secs(100_000)));
    seconds
}

/// Returns the number of seconds for which an answer with these headers is fresh.
fn lifetime(lines: &[(&'static str, &str)]) -> u64 {
    let start = Instant::now();
    fresh_seconds(&freshness(start, lines), start)
}

#[test]
fn explicit_lifetime_is_used() {
    assert_eq!(lifetime(&[("cache-control", "max-age=60")]), 60);
    assert_eq!(lifetime(&[("cache-control", "max-age=60, s-maxage=70")]), 70);
    assert_eq!(lifetime(&[("expires", &wall(50)), ("date", &wall(0))]), 50);
    assert_eq!(lifetime(&[("expires", &wall(50))]), 50);
    assert_eq!(lifetime(&[("expires", &wall(50)), ("cache-control", "max-age=60")]), 60);
    assert_eq!(lifetime(&[("expires", &wall(50)), ("cache-control", "public")]), 50);
    assert_eq!(lifetime(&[("cache-control", "max-age=60, must-revalidate")]), 60);
}

#[test]
fn missing_or_unreadable_lifetime_is_zero() {
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
        assert_eq!(lifetime(lines), 0, "{lines:?}");
    }
}

#[test]
fn age_reduces_the_lifetime() {
    assert_eq!(lifetime(&[("cache-control", "max-age=60"), ("age", "20")]), 40);
    assert_eq!(lifetime(&[("cache-control", "max-age=60"), ("date", &wall(-25))]), 35);
    assert_eq!(
        lifetime(&[("cache-control", "max-age=60"), ("age", "20"), ("date", &wall(-25))]),
        35
    );
    // An origin whose clock is ahead does not extend the lifetime.
    assert_eq!(lifetime(&[("cache-control", "max-age=60"), ("date", &wall(500))]), 60);
    let requested_at = Instant::now();
    let received = Received { requested_at, at: requested_at + secs(7), date: DATE + secs(NOW) };
    let headers = headers(&[("cache-control", "max-age=60"), ("age", "20")]);
    let freshness =
        Freshness::from_answer(&url(), &headers, received, RedirectFreshness::none(), BOUNDS);
    assert_eq!(fresh_seconds(&freshness, received.at), 33);
}

#[test]
fn operator_bounds_override_the_headers() {
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
        let freshness = Freshness::from_answer(
            &url(),
            &headers,
            received(start),
            RedirectFreshness::none(),
            bounds,
        );
        assert_eq!(fresh_seconds(&freshness, start), expected, "{control}");
        assert!(freshness.may_be_stored());
    }
    for control in ["no-store", "private, max-age=50"] {
        let headers = headers(&[("cache-control", control)]);
        let freshness = Freshness::from_answer(
            &url(),
            &headers,
            received(start),
            RedirectFreshness::none(),
            bounds,
        );
        assert!(!freshness.may_be_stored());
    }
}

#[test]
fn forbidden_or_useless_answer_is_not_stored() {
    let start = Instant::now();
    for (name, value) in [
        ("cache-control", "no-store"),
        ("cache-control", "private"),
        ("cache-control", "private=\"x\""),
        ("vary", "*"),
        ("vary", "accept, *"),
    ] {
        let lines = [("etag", "\"1\""), ("cache-control", "max-age=60"), (name, value)];
        assert!(!freshness(start, &lines).may_be_stored(), "{name}: {value}");
    }
    for lines in [
        &[("etag", "\"1\"")][..],
        &[("cache-control", "max-age=60")],
        &[("cache-control", "max-age=60"), ("vary", "accept, accept-encoding, cookie, origin")],
        &[("cache-control", "max-age=60"), ("set-cookie", "a=b")],
        &[("cache-control", "no-cache"), ("etag", "\"1\"")],
    ] {
        assert!(freshness(start, lines).may_be_stored(), "{lines:?}");
    }
    // The answer is neither fresh nor can it be revalidated.
    assert!(!freshness(start, &[]).may_be_stored());
    let mut forbidden = freshness(start, &[("cache-control", "max-age=60")]);
    forbidden.forbid_storing();
    assert!(!forbidden.may_be_stored());
}

#[test]
fn redirects_limit_the_lifetime() {
    let start = Instant::now();
    let after = |redirects: &[(bool, &str)]| {
        let mut path = RedirectFreshness::none();
        for &(permanent, control) in redirects {
            let line = [("cache-control", control)];
            let headers = headers(if control.is_empty() { &[] } else { &line });
            path.follow(permanent, &headers, received(start), BOUNDS);
        }
        Freshness::from_answer(
            &url(),
            &headers(&[("cache-control", "max-age=60")]),
            received(start),
            path,
            BOUNDS,
        )
    };
    for (redirects, expected) in [
        (&[(true, "")][..], 60),
        (&[(false, "")], 0),
        (&[(true, "max-age=20")], 20),
        (&[(true, "no-cache")], 0),
        (&[(false, "max-age=500")], 60),
        (&[(false, "max-age=30"), (true, "max-age=20"), (false, "max-age=40")], 20),
    ] {
        let freshness = after(redirects);
        assert_eq!(fresh_seconds(&freshness, start), expected, "{redirects:?}");
        assert_eq!(freshness.may_be_stored(), expected > 0, "{redirects:?}");
    }
    assert!(!after(&[(true, "no-store"), (false, "max-age=500")]).may_be_stored());
    assert!(!after(&[(true, ""), (false, "private, max-age=500")]).may_be_stored());
}

fn condition(lines: &[(&'static str, &str)]) -> Option<(HeaderName, HeaderValue)> {
    freshness(Instant::now(), lines).condition(&url())
}

#[test]
fn validator_is_sent_only_to_its_own_url() {
    let freshness = freshness(Instant::now(), &[("etag", "\"1\"")]);
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
fn malformed_or_unreliable_validator_is_ignored() {
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

    let settled = wall(-60);
    let recent = wall(-59);
    let header = condition(&[("last-modified", &settled)]);
    assert_eq!(header, Some((IF_MODIFIED_SINCE, HeaderValue::from_str(&settled).unwrap())));
    // The file could change again within the same second.
    assert_eq!(condition(&[("last-modified", &recent)]), None);
    assert_eq!(condition(&[("last-modified", &settled), ("date", &wall(-30))]), None);
    assert_eq!(condition(&[("last-modified", &wall(100))]), None);
    assert_eq!(condition(&[("last-modified", "yesterday")]), None);
    let (name, _) = condition(&[("last-modified", &settled), ("etag", "\"1\"")]).unwrap();
    assert_eq!(name, IF_NONE_MATCH);
}

#[test]
fn not_modified_renews_the_lifetime() {
    let start = Instant::now();
    let old = freshness(start, &[("etag", "\"1\""), ("cache-control", "max-age=60")]);
    let later = start + secs(100);
    for (headers, expected) in [
        (&[][..], 60),
        (&[("age", "5")], 55),
        (&[("cache-control", "max-age=30")], 30),
        (&[("cache-control", "no-cache")], 0),
        (&[("cache-control", "public")], 0),
        (&[("expires", "0")], 0),
    ] {
        let refreshed = old.clone().refreshed(freshness(later, headers));
        assert_eq!(fresh_seconds(&refreshed, later), expected, "{headers:?}");
        assert!(refreshed.may_be_stored() && refreshed.can_revalidate(), "{headers:?}");
        assert_eq!(refreshed.condition(&url()), old.condition(&url()));
    }
    assert!(
        !old.clone().refreshed(freshness(later, &[("cache-control", "no-store")])).may_be_stored()
    );
    for (control, expected) in
        [("no-cache", 0), ("max-age=60", 60), ("s-maxage=10", 10), ("public", 900)]
    {
        let old = freshness(start, &[("etag", "\"1\""), ("cache-control", control)]);
        let newer = freshness(later, &[("expires", &wall(900))]);
        assert_eq!(
            fresh_seconds(&old.refreshed(newer), later),
            expected,
            "`Expires` after {control}"
        );
    }
    // A stored `Expires` is an absolute time, independent of the 304's date.
    let expiring = freshness(start, &[("etag", "\"1\""), ("expires", &wall(150))]);
    for headers in [&[][..], &[("cache-control", "public")]] {
        let refreshed = expiring.clone().refreshed(freshness(later, headers));
        assert_eq!(fresh_seconds(&refreshed, later), 50, "{headers:?}");
        assert_eq!(
            fresh_seconds(
                &refreshed.refreshed(freshness(later + secs(100), &[])),
                later + secs(100)
            ),
            0
        );
    }
    // The redirects of the 304 count, not those of the stored answer.
    let mut redirect = RedirectFreshness::none();
    redirect.follow(false, &headers(&[("cache-control", "max-age=3")]), received(later), BOUNDS);
    let newer = Freshness::from_answer(&url(), &headers(&[]), received(later), redirect, BOUNDS);
    assert_eq!(fresh_seconds(&old.refreshed(newer), later), 3);
}

#[test]
fn not_modified_keeps_validators_missing_from_it() {
    let start = Instant::now();
    let old = freshness(start, &[("etag", "W/\"1\""), ("last-modified", &wall(-100))]);
    let refreshed = old.clone().refreshed(freshness(start, &[("last-modified", &wall(-90))]));
    assert_eq!(refreshed.condition(&url()).unwrap().1, "W/\"1\"");
    let refreshed = old.refreshed(freshness(start, &[("etag", "\"1\"")]));
    assert_eq!(refreshed.condition(&url()).unwrap().1, "\"1\"");
}

#[test]
fn not_modified_with_another_tag_is_not_a_confirmation() {
    let cached = freshness(Instant::now(), &[("etag", "\"1\"")]);
    assert!(cached.is_confirmed_by(&headers(&[])));
    assert!(cached.is_confirmed_by(&headers(&[("etag", "\"1\"")])));
    assert!(cached.is_confirmed_by(&headers(&[("etag", "W/\"1\"")])));
    assert!(!cached.is_confirmed_by(&headers(&[("etag", "\"2\"")])));
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
    /// Forbidden answers are never stored, answers never outlive their headers or the bounds, and
    /// stale answers stay stale.
    #[test]
    fn freshness_never_exceeds_headers_or_bounds(
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
        let values = [
            ("age", age.map(|age| age.to_string())),
            ("date", date.map(wall)),
            ("expires", expires.map(wall)),
        ];
        for (name, value) in values {
            if let Some(value) = value {
                map.append(name, HeaderValue::from_str(&value).unwrap());
            }
        }
        let start = Instant::now();
        let bounds = FreshnessBounds { min: secs(min), max: secs(max) };
        let redirects = RedirectFreshness::none();
        let freshness =
            Freshness::from_answer(&url(), &map, received(start), redirects, bounds);

        let forbidden = controls
            .iter()
            .any(|control| ["no-store", "private", "x=\""].contains(control));
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
                let from_expires = expires
                    .map(|expires| expires.saturating_sub(date.unwrap_or(0)).max(0) as u64);
                let lifetime = explicit.chain(from_expires).max();
                prop_assert!(
                    lifetime.is_some_and(|lifetime| probe + age.unwrap_or(0) < lifetime)
                );
                prop_assert!(!controls.contains(&"no-cache"));
            }
        }
    }

    /// Arbitrary bytes cause no panic.
    #[test]
    fn arbitrary_header_bytes_are_handled(
        values in prop::collection::vec(
            (0usize..8, prop::collection::vec(any::<u8>(), 0..40)),
            0..8,
        ),
    ) {
        let names = [
            super::DATE,
            EXPIRES,
            AGE,
            ETAG,
            LAST_MODIFIED,
            PRAGMA,
            VARY,
            reqwest::header::CACHE_CONTROL,
        ];
        let mut map = HeaderMap::new();
        for (name, value) in values {
            if let Ok(value) = HeaderValue::from_bytes(&value) {
                map.append(names[name].clone(), value);
            }
        }
        let start = Instant::now();
        let redirects = RedirectFreshness::none();
        let freshness =
            Freshness::from_answer(&url(), &map, received(start), redirects, BOUNDS);
        prop_assert_eq!(freshness.can_revalidate(), freshness.condition(&url()).is_some());
        let again = freshness.clone().refreshed(freshness);
        prop_assert!(!again.is_fresh(start + BOUNDS.max));
    }
}

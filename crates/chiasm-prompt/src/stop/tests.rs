use proptest::prelude::*;

use super::*;

fn all(stops: &[&str], include_stop: bool, pieces: &[&str]) -> (String, Option<String>) {
    let mut watch =
        StopStrings::new(stops.iter().map(|stop| (*stop).to_owned()).collect(), include_stop);
    let mut text = String::new();
    for piece in pieces {
        let step = watch.push(piece);
        text += &step.text;
        if step.stopped_by.is_some() {
            assert_eq!(watch.push("more"), StopStep::default());
            assert_eq!(watch.finish(), "");
            return (text, step.stopped_by);
        }
    }
    text += &watch.finish();
    (text, None)
}

#[test]
fn a_stop_string_across_pieces_is_cut() {
    assert_eq!(all(&["STOP"], false, &["go S", "TO", "P on"]), ("go ".into(), Some("STOP".into())));
    assert_eq!(
        all(&["STOP"], true, &["go S", "TO", "P on"]),
        ("go STOP".into(), Some("STOP".into()))
    );
}

#[test]
fn what_only_looked_like_a_stop_string_comes_out() {
    assert_eq!(all(&["aab"], false, &["a", "a", "a", "b!"]), ("a".into(), Some("aab".into())));
    assert_eq!(all(&["STOP"], false, &["go S", "TO"]), ("go STO".into(), None));
}

#[test]
fn the_one_that_ends_first_wins_and_then_the_first_in_the_list() {
    assert_eq!(all(&["abcd", "bc"], false, &["abcd"]), ("a".into(), Some("bc".into())));
    assert_eq!(all(&["bc", "abc"], false, &["abc"]), ("a".into(), Some("bc".into())));
    assert_eq!(all(&["abc", "bc"], false, &["abc"]), (String::new(), Some("abc".into())));
}

#[test]
fn nothing_is_held_back_that_cannot_become_a_stop_string() {
    let mut watch = StopStrings::new(vec!["\n\nHuman:".into()], false);
    assert_eq!(watch.push("plain text").text, "plain text");
    assert_eq!(watch.push(" and\n").text, " and");
    assert_eq!(watch.push("\nHum").text, "");
    assert_eq!(watch.push("ming").text, "\n\nHumming");
}

#[test]
fn an_included_stop_string_is_never_held_back() {
    let mut watch = StopStrings::new(vec!["é!".into()], true);
    assert_eq!(watch.push("caf").text, "caf");
    assert_eq!(watch.push("é").text, "é");
    assert_eq!(watch.push("!?"), StopStep { text: "!".into(), stopped_by: Some("é!".into()) });
}

#[test]
fn unwatched_text_may_hold_a_stop_string_but_only_begin_the_one_that_stops() {
    let mut watch = StopStrings::new(vec!["ab".into()], false);
    assert_eq!(watch.push_unwatched("ab a"), "ab ");
    assert_eq!(watch.push("b"), StopStep { text: String::new(), stopped_by: Some("ab".into()) });
}

#[test]
fn empty_stop_strings_do_not_stop() {
    assert_eq!(all(&[""], false, &["text"]), ("text".into(), None));
}

#[test]
fn many_long_stop_strings_cost_a_token_little() {
    let stops = (0..64).map(|number| format!("{number:02}{}", "q".repeat(1022))).collect();
    let (mut watch, begun) = (StopStrings::new(stops, false), std::time::Instant::now());
    for _ in 0..20_000 {
        assert_eq!(watch.push("word ").text, "word ");
    }
    // It is some ten milliseconds; to make what finds them for each token is seconds.
    assert!(begun.elapsed().as_secs_f64() < 1.0, "{:?}", begun.elapsed());
}

/// The rule written down for a whole text: characters one by one, as if each were a token.
fn by_the_rule(stops: &[String], include_stop: bool, text: &str) -> (String, Option<String>) {
    for end in (1..=text.len()).filter(|end| text.is_char_boundary(*end)) {
        for stop in stops {
            if text[..end].ends_with(stop.as_str()) {
                let cut = if include_stop { end } else { end - stop.len() };
                return (text[..cut].to_owned(), Some(stop.clone()));
            }
        }
    }
    (text.to_owned(), None)
}

proptest! {
    #[test]
    fn pieces_do_not_matter(
        pieces in prop::collection::vec("[abé]{0,4}", 0..12),
        stops in prop::collection::vec("[abé]{1,4}", 0..4),
        include_stop: bool,
    ) {
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        let names: Vec<&str> = stops.iter().map(String::as_str).collect();
        let whole = pieces.concat();
        prop_assert_eq!(all(&names, include_stop, &pieces), by_the_rule(&stops, include_stop, &whole));
    }
}

use proptest::prelude::*;

use super::*;

fn run(stops: &[&str], include_stop: bool, pieces: &[&str]) -> (String, Option<String>) {
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
fn stop_string_across_pieces_is_cut() {
    assert_eq!(run(&["STOP"], false, &["go S", "TO", "P on"]), ("go ".into(), Some("STOP".into())));
    assert_eq!(
        run(&["STOP"], true, &["go S", "TO", "P on"]),
        ("go STOP".into(), Some("STOP".into()))
    );
}

#[test]
fn prefix_of_a_stop_string_is_returned_later() {
    assert_eq!(run(&["aab"], false, &["a", "a", "a", "b!"]), ("a".into(), Some("aab".into())));
    assert_eq!(run(&["STOP"], false, &["go S", "TO"]), ("go STO".into(), None));
}

#[test]
fn earliest_end_wins_then_list_order() {
    assert_eq!(run(&["abcd", "bc"], false, &["abcd"]), ("a".into(), Some("bc".into())));
    assert_eq!(run(&["bc", "abc"], false, &["abc"]), ("a".into(), Some("bc".into())));
    assert_eq!(run(&["abc", "bc"], false, &["abc"]), (String::new(), Some("abc".into())));
}

#[test]
fn text_is_held_back_only_while_it_may_become_a_stop() {
    let mut watch = StopStrings::new(vec!["\n\nHuman:".into()], false);
    assert_eq!(watch.push("plain text").text, "plain text");
    assert_eq!(watch.push(" and\n").text, " and");
    assert_eq!(watch.push("\nHum").text, "");
    assert_eq!(watch.push("ming").text, "\n\nHumming");
}

#[test]
fn included_stop_string_is_never_held_back() {
    let mut watch = StopStrings::new(vec!["é!".into()], true);
    assert_eq!(watch.push("caf").text, "caf");
    assert_eq!(watch.push("é").text, "é");
    assert_eq!(watch.push("!?"), StopStep { text: "!".into(), stopped_by: Some("é!".into()) });
}

#[test]
fn unwatched_text_may_only_begin_a_stop_string() {
    let mut watch = StopStrings::new(vec!["ab".into()], false);
    assert_eq!(watch.push_unwatched("ab a"), "ab ");
    assert_eq!(watch.push("b"), StopStep { text: String::new(), stopped_by: Some("ab".into()) });
}

#[test]
fn empty_stop_strings_do_not_stop() {
    assert_eq!(run(&[""], false, &["text"]), ("text".into(), None));
}

#[test]
fn many_long_stop_strings_are_cheap_per_token() {
    let stops = (0..64).map(|number| format!("{number:02}{}", "q".repeat(1022))).collect();
    let mut watch = StopStrings::new(stops, false);
    let begun = std::time::Instant::now();
    for _ in 0..20_000 {
        assert_eq!(watch.push("word ").text, "word ");
    }
    // This takes about ten milliseconds. Building the searchers for each token would take seconds.
    assert!(begun.elapsed().as_secs_f64() < 1.0, "{:?}", begun.elapsed());
}

/// The reference for a whole text: checks character by character, as if each were a token.
fn reference(stops: &[String], include_stop: bool, text: &str) -> (String, Option<String>) {
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
    fn result_does_not_depend_on_the_pieces(
        pieces in prop::collection::vec("[abé]{0,4}", 0..12),
        stops in prop::collection::vec("[abé]{1,4}", 0..4),
        include_stop: bool,
    ) {
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        let names: Vec<&str> = stops.iter().map(String::as_str).collect();
        let whole = pieces.concat();
        let expected = reference(&stops, include_stop, &whole);
        prop_assert_eq!(run(&names, include_stop, &pieces), expected);
    }
}

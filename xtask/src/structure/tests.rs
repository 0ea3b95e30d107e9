//! Measures small artificial packages.

use std::fs;

use tempfile::TempDir;

use super::orders::{Level, Order};
use super::*;

/// `a` and `b` may use `c` and `d`; `c` and `d` may use each other.
const LEVELS: &[Level] = &[Level::Separate(&["a", "b"]), Level::Together(&["c", "d"])];

const LIMITS: Limits = Limits {
    crate_lines: 8,
    cycles: 0,
    files_per_cycle: 2,
    files_in_cycles: 2,
    orders: &[Order { package: "made-up", levels: LEVELS }],
};

/// Writes the files of the crate `name` below a new folder.
fn repository(name: &str, files: &[(&str, &str)]) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join("crates").join(name).join("src").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    root
}

/// Returns the lines of `describe` with arrows in cycles.
fn arrows_in_cycles(files: &[(&str, &str)]) -> Vec<String> {
    let root = repository("some", files);
    let text = describe(root.path(), "some").unwrap();
    text.lines().filter(|line| line.contains('→')).map(|line| line.trim().to_owned()).collect()
}

fn problems(name: &str, files: &[(&str, &str)]) -> Vec<String> {
    measure_against(repository(name, files).path(), &LIMITS).unwrap().problems
}

#[test]
fn mutual_use_of_two_files_is_cycle() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "use crate::b::{self, B, f as g}; pub struct A(B); fn h() { g(); b::f(); }"),
        ("b.rs", "pub struct B; pub fn f() {} fn g(a: &super::a::A) {}"),
    ];
    assert_eq!(arrows_in_cycles(&files), ["a.rs → b.rs: B, f", "b.rs → a.rs: A"]);
    assert_eq!(problems("some", &files), ["cycles of files: 1, the limit is 0"]);
}

#[test]
fn reexport_is_resolved_to_its_definition() {
    let files = [
        ("lib.rs", "mod a; mod b; mod front;"),
        ("a.rs", "use crate::front::B; pub struct A(B);"),
        ("b/mod.rs", "mod inner; pub use inner::*; use crate::a::A;"),
        ("b/inner.rs", "pub struct B(crate::a::A);"),
        ("front.rs", "pub use crate::b::B; pub use crate::a::A;"),
    ];
    assert_eq!(arrows_in_cycles(&files), ["a.rs → b/inner.rs: B", "b/inner.rs → a.rs: A"]);
}

#[test]
fn paths_in_macros_or_attributes_are_arrows() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "pub const A: u8 = 0; fn f() { println!(\"{}\", [x.y, crate::b::B]); }"),
        ("b.rs", "#[error(\"{}\", crate::a::A)] pub struct B;"),
    ];
    assert_eq!(arrows_in_cycles(&files), ["a.rs → b.rs: B", "b.rs → a.rs: A"]);
}

#[test]
fn tests_make_no_arrows() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "use crate::b::B; pub struct A(B);"),
        (
            "b.rs",
            "pub struct B; #[cfg(test)] mod tests;
            #[cfg(any(test, feature = \"t\"))] use crate::a::A;
            impl B { #[cfg(test)] fn f(a: crate::a::A) {} }
            #[test] fn f() { crate::a::A; }",
        ),
    ];
    assert_eq!(arrows_in_cycles(&files), [""; 0]);
}

#[test]
fn code_without_test_cfg_makes_arrows() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "use crate::b::B; pub struct A(B);"),
        ("b.rs", "pub struct B; #[cfg(not(test))] use crate::a::A;"),
    ];
    assert_eq!(arrows_in_cycles(&files).len(), 2);
}

#[test]
fn reference_to_ancestor_is_no_arrow() {
    let files = [
        ("lib.rs", "mod a; pub struct Root(a::A);"),
        ("a.rs", "mod child; pub struct A(child::Child);"),
        ("a/child.rs", "use super::A; pub struct Child(A, crate::Root);"),
    ];
    assert_eq!(arrows_in_cycles(&files), [""; 0]);
}

#[test]
fn circular_import_is_no_arrow() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "pub use super::b::X; use super::b::*; fn f() { X; y; }"),
        ("b.rs", "pub use super::a::X; pub use super::a::*; fn f() { X; y; }"),
    ];
    assert_eq!(arrows_in_cycles(&files), ["a.rs → b.rs: *"; 0]);
}

#[test]
fn arrow_against_order_is_reported() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c; mod d;"),
        ("a.rs", "use crate::b::B; use crate::c::C;"),
        ("b.rs", "pub struct B;"),
        ("c.rs", "pub struct C; mod child { use crate::b::B; use crate::d::D; }"),
        ("d.rs", "pub struct D;"),
    ];
    let expected = ["made-up: `a` may not use `b::B`", "made-up: `c` may not use `b::B`"];
    assert_eq!(problems("made-up", &files), expected);
}

#[test]
fn module_without_level_is_reported() {
    let files = [("lib.rs", "mod a; mod b; mod c { } mod e { }"), ("a.rs", ""), ("b.rs", "")];
    let no_level = "made-up: `e` has no level in structure/orders.rs";
    let gone = "made-up: structure/orders.rs names `d`, which is gone";
    assert_eq!(problems("made-up", &files), [no_level, gone]);
}

#[test]
fn lines_of_tests_are_not_counted() {
    let text = "mod a;\n\n// Kept.\n/// Left out.\n#[cfg(test)]\nmod tests {\n\n}\nfn f() {}\n";
    let child = "fn f() {}\n#[test]\nfn g() {\n}\n";
    let root = repository("some", &[("lib.rs", text), ("a.rs", child)]);
    let report = measure_against(root.path(), &LIMITS).unwrap();
    assert_eq!(report.text.lines().nth(1), Some("  some                      5 of      8"));
    assert!(report.problems.is_empty());
}

#[test]
fn crate_over_line_limit_is_reported() {
    let text = "// A line.\n".repeat(9);
    assert_eq!(problems("some", &[("lib.rs", &text)]), ["lines of some: 9, the limit is 8"]);
}

#[test]
fn string_error_is_reported_outside_xtask() {
    let text = "fn f() -> Result<u8, Error> { g::<Result<u8, u8>>() }
        struct S(Vec<std::result::Result<(), String>>);
        #[cfg(test)] fn h() -> Result<(), String> {}";
    assert_eq!(
        problems("some", &[("lib.rs", text)]),
        ["some: lib.rs:2 has an error that is a String"]
    );
    assert!(problems("xtask", &[("lib.rs", text)]).is_empty());
}

#[test]
fn unreadable_code_is_named() {
    let root = repository("some", &[("lib.rs", "mod a;"), ("a.rs", "fn (")]);
    let error = measure_against(root.path(), &LIMITS).unwrap_err().to_string();
    assert!(error.contains("a.rs is not Rust"), "{error}");
    assert!(describe(root.path(), "other").unwrap_err().to_string().contains("`other`"));
}

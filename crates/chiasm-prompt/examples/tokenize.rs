//! Times tokenizing against `tokenizers`, alternately, and checks that the tokens are the same:
//! `cargo run --release -p chiasm-prompt --example tokenize [-- model directory …]`.
//!
//! Prints a Markdown table for each model: microseconds per 1,000 tokens in one thread, and their
//! ratio. On a shared machine only the ratios are meaningful. `new` is the first round after
//! loading, when both caches are empty; `again` is the best of the further rounds for each text.
//! English is this repository's documentation, code its sources, and Chinese consists of frequent
//! words in random order. The default model is the demo's, whose vocabulary is tiny.

use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use chiasm_prompt::Tokenizer;

type Failure = Box<dyn Error + Send + Sync>;

/// The length of a text, about 1,000 tokens of a large vocabulary.
const TEXT_BYTES: usize = 4096;
/// The number of rounds after the first.
const ROUNDS: usize = 9;
/// Frequent Chinese words.
const WORDS: &str = "的 我们 是 在 有 中国 人民 这个 时候 可以 经济 发展 问题 没有 他们 进行 工作 研究 技术 一个 重要 世界 \
    生活 教育 学生 老师 今天 明天 天气 很好 计算机 语言 模型 数据 训练 推理 图像 因为 所以 但是 如果 城市 北京 上海 历史 文化 和 也 都 就 \
    不 了 上 下 大 小 新 多 看 说 要 去 来 会 能";

fn main() -> Result<(), Failure> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut models: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    if models.is_empty() {
        models.push(here.join("../chiasm/assets/model"));
    }
    let texts = [
        ("English", pieces(&read_all(&here.join("../../docs"), "md")?)),
        ("code", pieces(&read_all(&here.join("src"), "rs")?)),
        ("Chinese", pieces(&chinese(40 * TEXT_BYTES))),
    ];
    for model in models {
        measure(&model, &texts)?;
    }
    Ok(())
}

/// Prints the table of one model.
fn measure(model: &Path, texts: &[(&str, Vec<String>)]) -> Result<(), Failure> {
    let file = model.join("tokenizer.json");
    let memory = resident_kib();
    let begin = Instant::now();
    let peer = tokenizers::Tokenizer::from_file(&file)?;
    let peer_memory = resident_kib() - memory;
    let peer_load = begin.elapsed();
    let memory = resident_kib();
    let begin = Instant::now();
    let ours = Tokenizer::from_model_dir(model)?;
    let our_memory = resident_kib() - memory;
    let our_load = begin.elapsed();
    println!("{}: {} tokens", model.display(), ours.vocab_size());
    println!(
        "tokenizers: loaded in {peer_load:.0?}, {} MiB; \
         ours, which holds it too: {our_load:.0?}, {} MiB\n",
        peer_memory >> 10,
        our_memory >> 10
    );
    println!(
        "| text | tokens | tokenizers new µs | ours new µs | ratio \
         | tokenizers again µs | ours again µs | ratio |"
    );
    println!("|{}", "---|".repeat(8));
    for (name, texts) in texts {
        let mut count = 0;
        let mut new = [Duration::ZERO; 2];
        let mut again = [Duration::ZERO; 2];
        let mut best = vec![[Duration::MAX; 2]; texts.len()];
        for round in 0..=ROUNDS {
            for (text, best) in texts.iter().zip(&mut best) {
                let begin = Instant::now();
                let expected = peer.encode_fast(text.as_str(), false)?;
                let peer_time = begin.elapsed();
                let begin = Instant::now();
                let tokens = ours.encode(text, false)?;
                let times = [peer_time, begin.elapsed()];
                if !tokens.iter().map(|token| token.0).eq(expected.get_ids().iter().copied()) {
                    return Err(format!("the tokens differ from tokenizers' for {text:?}").into());
                }
                for (side, time) in times.into_iter().enumerate() {
                    if round == 0 {
                        new[side] += time;
                    } else {
                        best[side] = best[side].min(time);
                    }
                }
                count += if round == 0 { tokens.len() } else { 0 };
            }
        }
        for times in best {
            (0..2).for_each(|side| again[side] += times[side]);
        }
        let mut row = format!("| {name} | {count}");
        for [peer, ours] in [new, again] {
            let per_1000 = |time: Duration| time.as_secs_f64() * 1e9 / count as f64;
            let ratio = peer.as_secs_f64() / ours.as_secs_f64();
            write!(row, " | {:.0} | {:.0} | {ratio:.1}×", per_1000(peer), per_1000(ours))?;
        }
        println!("{row} |");
    }
    println!();
    Ok(())
}

/// Cuts a text into pieces of about [`TEXT_BYTES`], at character boundaries.
fn pieces(text: &str) -> Vec<String> {
    let mut texts = vec![String::new()];
    for c in text.chars() {
        if texts.last().is_some_and(|last| last.len() >= TEXT_BYTES) {
            texts.push(String::new());
        }
        if let Some(last) = texts.last_mut() {
            last.push(c);
        }
    }
    texts
}

/// Reads all files with an extension below a directory, in the order of their paths.
fn read_all(dir: &Path, extension: &str) -> Result<String, Failure> {
    let mut entries: Vec<_> = std::fs::read_dir(dir)?.collect::<Result<_, _>>()?;
    entries.sort_by_key(std::fs::DirEntry::path);
    let mut text = String::new();
    for entry in entries {
        let path = entry.path();
        if path.is_dir() {
            text += &read_all(&path, extension)?;
        } else if path.extension().is_some_and(|suffix| suffix == extension) {
            text += &std::fs::read_to_string(path)?;
        }
    }
    Ok(text)
}

/// Returns at least `bytes` of random Chinese text.
fn chinese(bytes: usize) -> String {
    let words: Vec<&str> = WORDS.split_whitespace().collect();
    let mut state = 1u64;
    let mut below = |end: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % end
    };
    let mut text = String::new();
    while text.len() < bytes {
        (0..2 + below(8)).for_each(|_| text.push_str(words[below(words.len())]));
        text.push(['，', '。', '，', '、'][below(4)]);
    }
    text
}

/// Returns the resident memory of this process in KiB; 0 on systems without `/proc`.
fn resident_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

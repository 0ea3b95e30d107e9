use std::io::{BufRead, Read};
fn main() {
    // stdin: path lines
    for line in std::io::stdin().lock().lines() {
        let path = line.unwrap();
        let mut f = Vec::new();
        std::fs::File::open(&path).unwrap().read_to_end(&mut f).unwrap();
        let show = |l: chiasm_audio::Loader| match chiasm_audio::Recording::read(&f, &l) {
            Ok(r) => format!("{} {}", r.rate, r.samples),
            Err(e) => format!("! {}", e.cause()),
        };
        println!("{path}\t{}\t{}", show(chiasm_audio::Loader::Sndfile{sndfile:"1.2.2".into(),avformat:Some(62)}), show(chiasm_audio::Loader::Torchcodec{ffmpeg:Some(8)}));
    }
}

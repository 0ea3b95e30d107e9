//! Measures the index and a cut of a generated mp4 with 18,000 samples, ten minutes of video, or of
//! a file. Writes the parts of the cut to a folder.
//!
//! Run with `cargo run --release -p chiasm-video --example video_index [FILE [FOLDER]]`.

use std::time::{Duration, Instant};

use chiasm_video::VideoIndex;

/// Ten minutes at 30 frames per second.
const SAMPLES: u32 = 18_000;
const GOP: u32 = 250;
/// Two non-reference pictures follow each reference picture.
const PERIOD: u32 = 3;
/// The mean size of a sample, as in 3.4 Mbit/s.
const SAMPLE_BYTES: u32 = 14_336;
const SLICES: u32 = 4;
const RUNS: usize = 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let file = match std::env::args().nth(1) {
        Some(path) => std::fs::read(path)?,
        None => generated_file(),
    };
    let mut times = Vec::new();
    for _ in 0..RUNS {
        let start = Instant::now();
        let index = VideoIndex::read(&file)?;
        times.push(start.elapsed());
        std::hint::black_box(index);
    }
    let index = VideoIndex::read(&file)?;
    let properties = index.properties();
    println!("{properties:?}, {} MB", file.len() / 1_000_000);
    print_times("index", times);
    let last = properties.visible_frames - 1;
    let wanted: Vec<u64> = (0..32).map(|number| number * last / 31).collect();
    let mut plan_times = Vec::new();
    let mut copy_times = Vec::new();
    for _ in 0..RUNS {
        let start = Instant::now();
        let cut = index.cut(&file, &wanted)?;
        plan_times.push(start.elapsed());
        let start = Instant::now();
        std::hint::black_box(cut.parts[0].to_vec(&file));
        copy_times.push(start.elapsed());
    }
    print_times("cut of 32 frames", plan_times);
    print_times("its copy", copy_times);
    let cut = index.cut(&file, &wanted)?;
    let bytes: usize = cut.parts.iter().map(|part| part.len()).sum();
    println!(
        "the cut has {:.1} % of the cost and {:.1} % of the bytes",
        100.0 * cut.decode_cost() as f64 / index.decode_cost() as f64,
        100.0 * bytes as f64 / file.len() as f64,
    );
    if let Some(folder) = std::env::args().nth(2) {
        for (number, part) in cut.parts.iter().enumerate() {
            std::fs::write(format!("{folder}/cut{number}.mp4"), part.to_vec(&file))?;
            println!("cut{number}.mp4: {:?}", part.frames);
        }
    }
    Ok(())
}

fn print_times(name: &str, mut times: Vec<Duration>) {
    times.sort();
    let [median, fastest] = [times[times.len() / 2], times[0]].map(|time| time.as_secs_f64() * 1e3);
    println!("{name}: median {median:.3} ms, fastest {fastest:.3} ms");
}

/// Returns an mp4 of 1280x720 pixels whose samples have headers but no pictures.
fn generated_file() -> Vec<u8> {
    let mut samples = Vec::new();
    for number in 0..SAMPLES {
        let place = number % GOP;
        let header = match place {
            0 => 0x65,
            place if place % PERIOD == 1 => 0x41,
            _ => 0x01,
        };
        let mut sample = Vec::new();
        for slice in 0..SLICES {
            let length = SAMPLE_BYTES / SLICES - 4;
            sample.extend(length.to_be_bytes());
            let first = if slice == 0 { 0x88 } else { 0x44 };
            sample.extend([header, first]);
            sample.resize(sample.len() + length as usize - 2, 0x55);
        }
        samples.push(sample);
    }
    let u32s = |values: &[u32]| -> Vec<u8> {
        values.iter().flat_map(|value| value.to_be_bytes()).collect()
    };
    let header = mp4_box(b"ftyp", b"isom\0\0\x02\0isomiso2mp41");
    let data_start = header.len() as u32 + 8;
    let matrix = [1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30];
    let mvhd = u32s(&[&[0, 0, 0, 1000, 600_000, 1 << 16, 0, 0, 0], &matrix[..], &[0; 7]].concat());
    let tkhd = u32s(&[&[3, 0, 0, 1, 0, 0, 0, 0, 0, 0], &matrix[..], &[0, 0]].concat());
    // High profile, level 3.1, 80 x 45 macroblocks, without VUI.
    let sps = [0x67, 0x64, 0, 0x1f, 0xac, 0xd9, 0x40, 0x50, 0x05, 0xba];
    let pps = [0x68, 0xeb, 0xe3, 0xcb];
    let mut config = vec![1, 0x64, 0, 0x1f, 0xff, 0xe1, 0, sps.len() as u8];
    config.extend(sps);
    config.extend([1, 0, pps.len() as u8]);
    config.extend(pps);
    let mut entry = vec![0; 78];
    entry[7] = 1;
    entry.extend(mp4_box(b"avcC", &config));
    let stsd = [u32s(&[0, 1]), mp4_box(b"avc1", &entry)].concat();
    let keys: Vec<u32> = (0..SAMPLES).step_by(GOP as usize).map(|number| number + 1).collect();
    let offsets: Vec<u32> = (0..SAMPLES).flat_map(|number| [1, offset(number)]).collect();
    let chunks: Vec<u32> = (0..SAMPLES).map(|number| data_start + number * SAMPLE_BYTES).collect();
    let stbl = [
        mp4_box(b"stsd", &stsd),
        mp4_box(b"stts", &u32s(&[0, 1, SAMPLES, 512])),
        mp4_box(b"ctts", &u32s(&[&[0, SAMPLES], &offsets[..]].concat())),
        mp4_box(b"stss", &u32s(&[&[0, keys.len() as u32], &keys[..]].concat())),
        mp4_box(b"stsc", &u32s(&[0, 1, 1, 1, 1])),
        mp4_box(
            b"stsz",
            &u32s(&[&[0, 0, SAMPLES], &vec![SAMPLE_BYTES; SAMPLES as usize][..]].concat()),
        ),
        mp4_box(b"stco", &u32s(&[&[0, SAMPLES], &chunks[..]].concat())),
    ]
    .concat();
    let mdia = [
        mp4_box(b"mdhd", &u32s(&[0, 0, 0, 15_360, SAMPLES * 512, 0])),
        mp4_box(b"hdlr", b"\0\0\0\0\0\0\0\0vide\0\0\0\0\0\0\0\0\0\0\0\0\0"),
        mp4_box(b"minf", &mp4_box(b"stbl", &stbl)),
    ]
    .concat();
    let trak = [mp4_box(b"tkhd", &tkhd), mp4_box(b"mdia", &mdia)].concat();
    let moov = [mp4_box(b"mvhd", &mvhd), mp4_box(b"trak", &trak)].concat();
    [header, mp4_box(b"mdat", &samples.concat()), mp4_box(b"moov", &moov)].concat()
}

/// Returns the composition offset: a reference picture is shown behind the two pictures that follow
/// it in decoding order.
fn offset(number: u32) -> u32 {
    match number % GOP {
        0 => 512,
        place if place % PERIOD == 1 => 3 * 512,
        _ => 0,
    }
}

fn mp4_box(name: &[u8; 4], body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32 + 8).to_be_bytes(), &name[..], body].concat()
}

//! The headers of a cut: an mp4 with one track and one chunk.
//!
//! Composition offsets give the true order of presentation. libavformat takes the reorder depth
//! from them if an H.264 stream does not state it; frames would be lost or swapped without.

use crate::bytes::u32_at;
use crate::error::CutError;
use crate::index::VideoIndex;
use crate::track::{Codec, Colour, Headers};

/// The duration of a sample in ticks. Any constant works.
const TICKS_PER_SAMPLE: u32 = 33;
/// The time scale of a made track.
const TIMESCALE: u32 = 1000;
/// The size of the header of `mdat`.
const MDAT_HEADER_BYTES: usize = 8;
/// The matrix of a picture that is not rotated.
const IDENTITY: [u32; 9] = [1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30];

/// Returns everything in front of the samples. `ranks` are the samples' positions in presentation
/// order.
pub(crate) fn header(
    index: &VideoIndex,
    file: &[u8],
    kept: impl Iterator<Item = u32> + Clone,
    ranks: &[u32],
) -> Result<Vec<u8>, CutError> {
    let sizes: Vec<u32> =
        kept.clone().map(|sample| index.track.samples[sample as usize].size).collect();
    let data_bytes: u64 = sizes.iter().copied().map(u64::from).sum();
    let mdat_bytes = u32::try_from(data_bytes + MDAT_HEADER_BYTES as u64);
    let mdat_bytes = mdat_bytes.map_err(|_| CutError::TooLarge)?;
    let shift = (0i64..).zip(ranks).map(|(place, &rank)| place - i64::from(rank)).max();
    let shift = shift.unwrap_or(0);
    let offsets = (0i64..).zip(ranks).map(|(place, &rank)| i64::from(rank) - place + shift);
    let count = sizes.len() as u32;
    let mut boxes = BoxWriter::default();
    boxes.write(b"ftyp", |boxes| boxes.raw(b"isom\0\0\x02\0isomiso2mp41"));
    let mut chunk_offset_at = 0;
    let heads = Heads::new(index, file).ok_or(CutError::OtherFile)?;
    boxes.write(b"moov", |boxes| {
        boxes.raw(&heads.mvhd);
        boxes.write(b"trak", |boxes| {
            boxes.raw(&heads.tkhd);
            boxes.write(b"mdia", |boxes| {
                boxes.raw(&heads.mdhd);
                boxes.raw(&heads.hdlr);
                boxes.write(b"minf", |boxes| {
                    boxes.full(b"vmhd", 1, |boxes| boxes.u32s([0, 0]));
                    boxes.write(b"dinf", |boxes| {
                        boxes.full(b"dref", 0, |boxes| {
                            boxes.u32s([1]);
                            boxes.full(b"url ", 1, |_| {});
                        });
                    });
                    boxes.write(b"stbl", |boxes| {
                        boxes.raw(&heads.stsd);
                        boxes.full(b"stts", 0, |boxes| boxes.u32s([1, count, TICKS_PER_SAMPLE]));
                        boxes.full(b"ctts", 0, |boxes| {
                            boxes.u32s([count]);
                            for offset in offsets {
                                boxes.u32s([1, offset as u32 * TICKS_PER_SAMPLE]);
                            }
                        });
                        boxes.full(b"stsc", 0, |boxes| boxes.u32s([1, 1, count, 1]));
                        boxes.full(b"stsz", 0, |boxes| {
                            boxes.u32s([0, count]);
                            boxes.u32s(sizes);
                        });
                        boxes.full(b"stss", 0, |boxes| {
                            let samples = &index.track.samples;
                            let sync = (1u32..).zip(kept);
                            let sync = sync.filter(|&(_, sample)| samples[sample as usize].is_sync);
                            boxes.u32s([sync.clone().count() as u32]);
                            boxes.u32s(sync.map(|(number, _)| number));
                        });
                        boxes.full(b"stco", 0, |boxes| {
                            boxes.u32s([1]);
                            chunk_offset_at = boxes.bytes.len();
                            boxes.u32s([0]);
                        });
                    });
                });
            });
        });
    });
    let mut bytes = boxes.bytes;
    let chunk_offset = u32::try_from(bytes.len() + MDAT_HEADER_BYTES);
    let chunk_offset = chunk_offset.map_err(|_| CutError::TooLarge)?;
    bytes[chunk_offset_at..chunk_offset_at + 4].copy_from_slice(&chunk_offset.to_be_bytes());
    bytes.extend(mdat_bytes.to_be_bytes());
    bytes.extend(b"mdat");
    Ok(bytes)
}

/// The boxes that do not depend on the samples.
struct Heads {
    mvhd: Vec<u8>,
    tkhd: Vec<u8>,
    mdhd: Vec<u8>,
    hdlr: Vec<u8>,
    stsd: Vec<u8>,
}

impl Heads {
    fn new(index: &VideoIndex, file: &[u8]) -> Option<Self> {
        match &index.track.headers {
            Headers::Copied(boxes) => {
                let copy = |range: &std::ops::Range<usize>| {
                    let bytes = file.get(range.clone())?;
                    // A size of zero or a 64-bit size would not fit in front of other boxes.
                    let has_size = u32_at(bytes, 0) == u32::try_from(bytes.len()).ok();
                    has_size.then(|| bytes.to_vec())
                };
                Some(Self {
                    mvhd: copy(&boxes.mvhd)?,
                    tkhd: copy(&boxes.tkhd)?,
                    mdhd: copy(&boxes.mdhd)?,
                    hdlr: copy(&boxes.hdlr)?,
                    stsd: copy(&boxes.stsd)?,
                })
            }
            &Headers::Made { width, height, colour } => {
                let config = file.get(index.track.config.clone())?;
                Some(Self::made(index.track.codec, config, width, height, colour))
            }
        }
    }

    fn made(codec: Codec, config: &[u8], width: u16, height: u16, colour: Option<Colour>) -> Self {
        let build = |name, fill: &mut dyn FnMut(&mut BoxWriter)| {
            let mut boxes = BoxWriter::default();
            boxes.full(name, 0, |boxes| fill(boxes));
            boxes.bytes
        };
        Self {
            mvhd: build(b"mvhd", &mut |boxes| {
                boxes.u32s([0, 0, TIMESCALE, 0, 1 << 16, 1 << 24, 0, 0]);
                boxes.u32s(IDENTITY);
                boxes.u32s([0, 0, 0, 0, 0, 0, 2]);
            }),
            tkhd: build(b"tkhd", &mut |boxes| {
                boxes.u32s([0, 0, 1, 0, 0, 0, 0, 0, 0]);
                boxes.u32s(IDENTITY);
                boxes.u32s([u32::from(width) << 16, u32::from(height) << 16]);
            }),
            mdhd: build(b"mdhd", &mut |boxes| boxes.u32s([0, 0, TIMESCALE, 0, 0x55c4_0000])),
            hdlr: build(b"hdlr", &mut |boxes| {
                boxes.u32s([0]);
                boxes.raw(b"vide");
                boxes.raw(&[0; 13]);
            }),
            stsd: build(b"stsd", &mut |boxes| {
                boxes.u32s([1]);
                boxes.write(entry_name(codec), |boxes| {
                    boxes.raw(&[0, 0, 0, 0, 0, 0, 0, 1]);
                    boxes.raw(&[0; 16]);
                    boxes.raw(&width.to_be_bytes());
                    boxes.raw(&height.to_be_bytes());
                    // 72 dots per inch, one frame per sample, no compressor name, 24 bits.
                    boxes.u32s([72 << 16, 72 << 16, 0]);
                    boxes.raw(&[0, 1]);
                    boxes.raw(&[0; 32]);
                    boxes.raw(&[0, 24, 0xff, 0xff]);
                    write_config(boxes, codec, config);
                    if let Some(colour) = colour {
                        boxes.write(b"colr", |boxes| {
                            boxes.raw(b"nclx");
                            boxes.raw(&colour.primaries.to_be_bytes());
                            boxes.raw(&colour.transfer.to_be_bytes());
                            boxes.raw(&colour.matrix.to_be_bytes());
                            boxes.raw(&[u8::from(colour.is_full_range) << 7]);
                        });
                    }
                });
            }),
        }
    }
}

fn entry_name(codec: Codec) -> &'static [u8; 4] {
    match codec {
        Codec::H264 => b"avc1",
        Codec::Hevc => b"hvc1",
        Codec::Vp8 => b"vp08",
        Codec::Vp9 => b"vp09",
    }
}

fn write_config(boxes: &mut BoxWriter, codec: Codec, config: &[u8]) {
    match codec {
        Codec::H264 => boxes.write(b"avcC", |boxes| boxes.raw(config)),
        Codec::Hevc => boxes.write(b"hvcC", |boxes| boxes.raw(config)),
        // Profile 0, level 1, 8 bits, unknown colours. Decoders read the frames' own headers.
        Codec::Vp8 | Codec::Vp9 => {
            boxes.full(b"vpcC", 1 << 24, |boxes| boxes.raw(&[0, 10, 0x82, 2, 2, 2, 0, 0]));
        }
    }
}

/// Writes nested boxes.
#[derive(Default)]
struct BoxWriter {
    bytes: Vec<u8>,
}

impl BoxWriter {
    /// Writes a box around what `fill` writes.
    fn write(&mut self, name: &[u8; 4], fill: impl FnOnce(&mut Self)) {
        let start = self.bytes.len();
        self.bytes.extend([0; 4]);
        self.bytes.extend(name);
        fill(self);
        // The header of a cut has a few bytes per sample, far below 4 GiB.
        let size = (self.bytes.len() - start) as u32;
        self.bytes[start..start + 4].copy_from_slice(&size.to_be_bytes());
    }

    /// Writes a full box: with a version, 0 unless `flags` has it in its upper byte, and flags.
    fn full(&mut self, name: &[u8; 4], flags: u32, fill: impl FnOnce(&mut Self)) {
        self.write(name, |boxes| {
            boxes.u32s([flags]);
            fill(boxes);
        });
    }

    fn u32s(&mut self, values: impl IntoIterator<Item = u32>) {
        for value in values {
            self.bytes.extend(value.to_be_bytes());
        }
    }

    fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
    }
}

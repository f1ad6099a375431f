// Products of one weight of 512 columns and 512 features, for counting the instructions that they execute: see run.py.
//
//   products FORM ROWS BITS REPEATS   FORM: of WeightForm, 0 is bfloat16; BITS: of rounded rows
#include "forms.cpp"
#include "lora.h"
#include "tiles_f32.cpp"

bool has_amx = false;
thread_local int max_threads = 1;

constexpr int64_t COLUMNS = 512, FEATURES = 512;

int main(int, char **arguments) {
    const int64_t form = atoi(arguments[1]), rows = atoi(arguments[2]), bits = atoi(arguments[3]);
    const int64_t form_bytes = form ? COLUMNS / PANEL * num_blocks(FEATURES) * quantized_form(form).block_bytes : 0;
    const std::vector<bf16> panels(COLUMNS * FEATURES + form_bytes);  // zeros: the count does not depend on them
    const Weight<bf16> weight{panels.data(), nullptr, nullptr, COLUMNS, FEATURES, form, bits};
    std::vector<bf16> x(rows * FEATURES, bf16{0x3f80}), out(rows * COLUMNS);
    for (int left = atoi(arguments[4]); left; left--)
        this_team().run(1, [&](const TeamThread &thread) {
            linear<bf16>(thread, x.data(), FEATURES, rows, weight, nullptr, out.data(), COLUMNS);
        });
}

// ranks.cu (test): the GPU program's start, without GPUs: a rank takes its GPU, meets the others and gets NCCL's
// identifier.
//
//   ranks WHAT [--nproc N]      WHAT: "end"; "train" until it is stopped; a number: that rank fails after a
//                              moment; "bad": rank 0 finds bad input, and no other does
#include "bootstrap.h"
#include "device.h"
#include "launch.h"

int main(int argc, char **argv) {
    Error error = {""};
    const Place place = place_from_environment(&error);
    if (error.text[0] != '\0') die_input(&error);
    const char *what = argv[1];
    const int nproc = argc > 3 ? atoi(argv[3]) : 1;
    const int world_size = place.launched ? place.world_size : nproc;
    if (!bootstrap_check(&place, world_size, &error) || (!place.launched && !device_check(world_size, &error)))
        die_input(&error);
    if (!place.launched && nproc > 1) return bootstrap_launch(nproc, argv);
    if (strcmp(what, "bad") == 0 && place.rank == 0) {
        error_set(&error, "no such data");
        bootstrap_meet(&place, atof(getenv("TEST_TIMEOUT")), &error);
        die_input(&error);
    }
    stop_on_signals();
    int device = 0;
    device_choose(place.local_rank, place.local_size, &device, &error);
    bootstrap_meet(&place, atof(getenv("TEST_TIMEOUT")), &error);
    const ncclUniqueId id = bootstrap_id(place.rank, place.world_size);
    printf("rank %d of %d on GPU %d: ", place.rank, place.world_size, device);
    for (size_t i = 0; i < sizeof id; i++) printf("%02x", (unsigned char)id.internal[i]);
    printf("\n");
    fflush(stdout);
    if (what[0] - '0' == place.rank) {
        usleep(300000);
        die("out of luck");
    }
    const bool ends = strcmp(what, "end") == 0;
    while (!ends && !stop_requested()) usleep(10000);
    bootstrap_close();
    return ends ? 0 : EXIT_STOPPED;
}
